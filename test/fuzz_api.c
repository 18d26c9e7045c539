/* fuzz_api.c - libFuzzer entry: bodies over HTTP. The first byte selects the route. A body becomes
 * a call, or gets a status, a type and a message. A call is answered from made-up events, and the
 * output must be JSON; in a stream, each chunk. */

static void check_json(str text) {
    arena a = {0};
    toka_err e;
    if (!json_parse(&a, text, json_trusted, &e)) printf("%s: %.*s\n", e.msg, (int)text.n, text.p), abort();
    arena_free(&a);
}

static void check_stream(str s) {
    while (s.n) {
        ptrdiff_t end = str_find(s, STR("\n\n"), 0);
        /* Responses and Messages have a line with the type of an event before its data */
        const ptrdiff_t line = str_starts(s, STR("event: ")) ? str_find(s, STR("\n"), 0) + 1 : 0;
        if (end < 0 || !str_starts(str_sub(s, (size_t)line, s.n), STR("data: "))) abort();
        str chunk = str_sub(s, (size_t)line + 6, (size_t)end);
        if (!str_is(chunk, "[DONE]")) check_json(chunk);
        s = str_sub(s, (size_t)end + 2, s.n);
    }
}

static const int t_width = 256; /* of test/model */

/* Events for all samples of all prompts: the ids come from the body's bytes. Samples after the
 * first 8 are cancelled. */
static void answer(api_request *c, const uint8_t *data, size_t size) {
    buf records = {0}, out = {0};
    for (int k = 0; k < c->n_prompts; k++) {
        api_prompt *p = &c->prompts[k];
        int32_t top_ids[TOKA_MAX_LOGPROBS];
        float top[TOKA_MAX_LOGPROBS];
        for (int i = 0; i < TOKA_MAX_LOGPROBS; i++) top_ids[i] = data[(size_t)(i * 5) % size], top[i] = -(float)i;
        toka_event ev = {.logprob = -1, .stop_id = -1, .stop_text = -1, .top_ids = top_ids, .top_logprobs = top, .sample = TOKA_PROMPT};
        for (size_t i = 0; p->engine_request.prompt_logprobs && i < p->ids.n; i++) {
            ev.id = p->ids.p[i], ev.n_top = i ? p->engine_request.prompt_top : 0;
            ev.finish = p->engine_request.n || i + 1 < p->ids.n ? TOKA_RUNNING : TOKA_LENGTH;
            api_pack_event(p, &ev, &records);
        }
        if (p->engine_request.pooling) { /* ends in a vector, or is cancelled */
            float vector[1024] = {1};
            toka_event end = {.sample = TOKA_PROMPT, .id = -1, .finish = size % 5 ? TOKA_LENGTH : TOKA_CANCELLED, .stop_id = -1, .stop_text = -1};
            if (size % 5) end.vector = vector, end.n_vector = p->engine_request.dimensions ? p->engine_request.dimensions : t_width;
            api_pack_event(p, &end, &records);
        }
        for (ev.sample = 0; ev.sample < p->engine_request.n; ev.sample++)
            for (int i = 0; i < 3; i++) {
                ev.id = ev.sample < 8 ? data[(size_t)(i + ev.sample) % size] * 8 : -1, ev.n_top = ev.id < 0 ? 0 : MAX(p->engine_request.sampling.logprobs, 0);
                ev.finish = ev.id < 0 ? TOKA_CANCELLED : i == 2 ? TOKA_LENGTH : TOKA_RUNNING;
                ev.text = p->engine_request.sampling.n_stop ? "ab" : NULL, ev.text_bytes = 2;
                toka_event seen = ev;
                const int end = api_watch_event(p, &seen);
                if (end && (end != TOKA_END_SAMPLE || seen.finish != TOKA_STOP || seen.stop_text < 0)) abort();
                api_pack_event(p, &seen, &records);
                if (ev.id < 0 || end) break;
            }
    }
    api_feed(c, buf_view(&records), &out);
    if (c->n_left) abort();
    api_finish(c, &out);
    if (c->stream) check_stream(buf_view(&out));
    else check_json(buf_view(&out));
    buf_free(&records), buf_free(&out);
}

static int fuzz_api(const uint8_t *data, size_t size) {
    static toka *t;
    static toka_options open;
    static const char *const names[] = {"m"};
    toka_err e = {0};
    if (!t) {
        open = toka_options_default(), open.model = "test/model";
        if (lib_open_text(&t, &open, false, &e)) abort();
    }
    if (!size) return 0;
    api_config m = {.toka = t, .names = names, .n_names = 1, .fingerprint = "fp", .defaults = toka_request_default(), .completion_tokens = 16,
                   .max_len = 128, .max_choices = 64, .max_answer_bytes = 1 << 20, .now = "2025-01-01 00:00:00", .limits = {32, 1 << 20},
                   .strict = data[0] & 8, .live = !(data[0] & 16)};
    enum api_route route = data[0] & 4 ? API_RESPONSES + (data[0] & 1) : data[0] & 3;
    if (data[0] & 32) route = API_EMBEDDINGS + (data[0] & 3) % 3;
    if (data[0] & 128) route = API_SGLANG;
    t->files->embedding.is_given = true;
    t->files->embedding.true_id = data[0] & 64 ? 400 : -1, t->files->embedding.false_id = 401;
    str body = {(const char *)data + 1, size - 1};
    buf out = {0};
    if (route == API_TOKENIZE || route == API_DETOKENIZE) {
        api_fault fault;
        if (api_answer_tokenize(&m, route, body, &out, &e, &fault)) api_put_error(&out, fault.status, e.msg, fault.type, fault.param, fault.code);
        check_json(buf_view(&out));
    } else {
        api_request c = {.serial = {1, 2}, .style = api_style_of(route)};
        if (!api_parse(&m, route, body, &c, &e)) {
            answer(&c, data, size);
        } else {
            if (c.status < 400 || !e.msg[0]) abort();
            api_put_error(&out, c.status, e.msg, c.type, c.param, c.code);
            check_json(buf_view(&out));
        }
        api_free(&c);
    }
    buf_free(&out);
    return 0;
}
