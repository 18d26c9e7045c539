/* fuzz_parse.c - libFuzzer entry: the text of an answer is parsed in the same way whole and in
 * pieces. Header: the form of calls (its highest bit: as if a constraint made calls valid, so what is
 * delivered early may be no JSON), the family of reasoning (from COUNT on: none; its highest bit:
 * stop strings; the next: marks of harmony behind a byte 1 are tokens, others are text), flags and the size of the pieces. Arguments of a call that was held are a JSON
 * object; content has no stop string. With the highest bit of the third byte the rest is a schema: the
 * structure of its calls compiles or says why not, and a call with texts of it as parameters is read. */

static const char *const fuzz_parse_stops[] = {"}\n", "\n\n", "x", "</"};

/* A call whose parameters have the types of a hostile schema. */
static void fuzz_parse_types(const json *schema, str text, arena *memory) {
    toka_err e;
    buf wrapped = {0}, call = {0};
    parse_tool *list;
    parser p;
    buf_c(&wrapped, "[{\"function\":{\"name\":\"f\",\"parameters\":"), json_put_value(&wrapped, schema), buf_c(&wrapped, "}}]");
    const json *tools = json_parse(memory, buf_view(&wrapped), (json_limits){74, 1 << 20}, &e);
    if (tools) {
        const int n_tools = parse_tools_init(memory, tools, &list);
        const parse_setup setup = {.format = parse_find_format("glm45", STR("")), .tools = list, .n_tools = n_tools};
        parser_init(&p, &setup);
        buf_c(&call, "<tool_call>f");
        for (size_t n = 0; n < 30 && 2 * n <= text.n; n++)
            buf_c(&call, "<arg_key>"), buf_str(&call, str_sub(text, n, 2 * n)), buf_c(&call, "</arg_key><arg_value>1</arg_value>");
        buf_c(&call, "</tool_call>");
        parser_feed(&p, buf_view(&call)), parser_end(&p);
        parser_free(&p);
    }
    buf_free(&wrapped), buf_free(&call);
}

/* A hostile schema, name and content of a tool. */
static void fuzz_parse_structure(const parse_setup *setup, str text, uint8_t flags, arena *memory) {
    toka_err e;
    const json *schema = json_parse(memory, text, (json_limits){64, 1 << 20}, &e);
    buf function = {0}, out = {0};
    if (!schema) return;
    buf_c(&function, "{\"strict\":true,\"name\":"), json_put_str(&function, str_sub(text, 0, MIN(text.n, (size_t)9)));
    buf_c(&function, ",\"parameters\":"), json_put_value(&function, schema), buf_c(&function, "}");
    const json *functions[1] = {json_parse(memory, buf_view(&function), (json_limits){70, 1 << 20}, &e)};
    if (functions[0]) fuzz_parse_types(schema, text, memory);
    const parse_demand demand = {.setup = setup, .functions = functions, .n_functions = functions[0] != NULL, .may_call = true, .must_call = flags & 64,
                                 .content = flags & 32 ? STR("{\"type\":\"any_text\"}") : STR("")};
    parse_put_answer(&demand, &out);
    const toka_grammar g = {.kind = TOKA_GRAMMAR_STRUCTURE, .text = out.p, .text_bytes = out.n};
    const con_vocab vocab = {.words = 1};
    toka_constraint *c;
    const int code = con_new(&c, &g, NULL, &vocab, &e);
    if (code && (code != TOKA_E_USE || !*e.msg || c)) abort();
    if (!code) con_del(c);
    buf_free(&function), buf_free(&out);
}

/* Returns the mark of harmony that a text begins with, or an empty text. */
static str fuzz_parse_mark(str text) {
    for (int i = 0; i < COUNT(parse_harmony_ends); i++)
        if (str_starts(text, parse_harmony_ends[i])) return parse_harmony_ends[i];
    return str_starts(text, str_c(parse_harmony_begins)) ? str_c(parse_harmony_begins) : STR("");
}

static void fuzz_parse_in_pieces(const parse_setup *setup, str text, size_t n_bytes, parser *p) {
    parser_init(p, setup);
    for (size_t at = 0, n; at < text.n; at += n) {
        const str rest = str_sub(text, at + 1, text.n);
        const str mark = text.p[at] == 1 && setup->has_mark_tokens ? fuzz_parse_mark(rest) : STR("");
        n = mark.n ? 1 + mark.n : MIN(n_bytes, text.n - at);
        for (size_t i = 1; i < n && setup->has_mark_tokens && !mark.n; i++)
            if (text.p[at + i] == 1) n = i;
        if (mark.n) {
            parser_feed_token(p, mark, mark);
            continue;
        }
        char *exact = mem_alloc(n); /* of the exact size, so that a read past the end is noticed */
        memcpy(exact, text.p + at, n);
        parser_feed(p, (str){exact, n});
        free(exact);
    }
    parser_end(p);
}

static int fuzz_parse(const uint8_t *data, size_t size) {
    static const char tools[] = "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"o\":{\"type\":\"object\"},\"u\":{}}}}}]";
    if (size < 3) return 0;
    arena memory = {0};
    toka_err e;
    parse_tool *list;
    const uint8_t flags = data[2], family = data[1] & 63;
    parse_setup setup = {.format = &parse_formats[data[0] % COUNT(parse_formats)], .valid_calls = data[0] & 128, .thinking = flags & 1, .one_call = flags & 2, .thought = flags & 4};
    setup.has_mark_tokens = data[1] & 64;
    if (family < COUNT(parse_families)) setup.family = &parse_families[family];
    setup.thinking &= setup.family != NULL;
    if (data[1] & 128) setup.stop = fuzz_parse_stops, setup.n_stop = COUNT(fuzz_parse_stops);
    setup.n_tools = parse_tools_init(&memory, json_parse(&memory, str_c(tools), json_trusted, &e), &list);
    setup.tools = list;
    const str text = {(const char *)data + 3, size - 3};
    if (flags & 128) {
        fuzz_parse_structure(&setup, text, flags, &memory);
        arena_free(&memory);
        return 0;
    }
    parser whole, cut;
    fuzz_parse_in_pieces(&setup, text, size, &whole);
    fuzz_parse_in_pieces(&setup, text, 1 + (flags >> 3), &cut);
    if (!str_eq(buf_view(&whole.events), buf_view(&cut.events))) abort();
    parse_event event;
    if (whole.stop.ended != cut.stop.ended) abort();
    for (str events = buf_view(&whole.events); parse_next_event(&events, &event);) {
        const bool valid = setup.valid_calls || event.kind != PARSE_ARGUMENTS || json_is(json_parse(&memory, event.text, json_trusted, &e), JSON_OBJECT);
        if (!valid && e.code != TOKA_E_MEMORY) abort();
        if (event.kind == PARSE_CALL && !event.text.n) abort();
        for (int i = 0; i < setup.n_stop && event.kind == PARSE_CONTENT; i++)
            if (str_find(event.text, str_c(setup.stop[i]), 0) >= 0) abort();
    }
    parser_free(&whole), parser_free(&cut);
    arena_free(&memory);
    return 0;
}
