/* Tests of chapters 36 and 37: every field of a body with every wrong type, answers byte for byte,
 * streams against whole answers, characters that are divided into several tokens. The events are
 * made up here; of the model only the tokenizer and the template are used. */

static toka *api_text_model(void) {
    static toka *t;
    static toka_options o;
    toka_err e;
    if (t) return t;
    o = toka_options_default(), o.model = "test/model";
    if (lib_open_text(&t, &o, false, &e)) printf("%s\n", e.msg), abort();
    return t;
}

static const char *const api_names[] = {"m", "other"};

static api_config api_test_model(void) {
    return (api_config){.toka = api_text_model(), .names = api_names, .n_names = 2, .fingerprint = "fp", .defaults = toka_request_default(),
                       .completion_tokens = 16, .max_len = 128, .max_choices = 64, .now = "2025-01-01 00:00:00",
                       .limits = {32, 1 << 20}, .live = true};
}

/* ---- What is refused ---- */

typedef struct api_refusal {
    int status;
    char param[64], code[64], message[500];
} api_refusal;

/* status 0: the body was accepted. */
static api_refusal api_refuse(const api_config *m, enum api_route route, const char *body) {
    api_refusal r = {0};
    toka_err e = {0};
    const char *param = NULL, *code = NULL;
    if (route >= API_TOKENIZE) {
        buf out = {0};
        api_fault f = {0};
        api_answer_tokenize(m, route, str_c(body), &out, &e, &f);
        r.status = f.status, param = f.param, code = f.code;
        buf_free(&out);
    } else {
        api_request c = {.serial = {1, 2}};
        api_parse(m, route, str_c(body), &c, &e);
        r.status = c.status, param = c.param, code = c.code;
        api_free(&c);
    }
    snprintf(r.param, sizeof r.param, "%s", param ? param : "");
    snprintf(r.code, sizeof r.code, "%s", code ? code : "");
    snprintf(r.message, sizeof r.message, "%s", e.msg);
    return r;
}

static const char *const api_required[] = {"\"prompt\":\"Tom\"", "\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}]",
                                        "\"prompt\":\"Tom\"", "\"tokens\":[5]"};

static bool api_is_needed(enum api_route route, const char *field) {
    str required = str_c(api_required[route]);
    return str_starts(str_sub(required, 1, required.n), str_c(field)) && required.p[1 + strlen(field)] == '"';
}

/* A body with this value of the field, and the fields that the route requires. */
static api_refusal api_refuse_value(const api_config *m, enum api_route route, const char *field, const char *value) {
    buf b = {0};
    bool own = api_is_needed(route, field);
    buf_printf(&b, "{%s%s\"%s\":%s}", own ? "" : api_required[route], own ? "" : ",", field, value);
    api_refusal r = api_refuse(m, route, b.p);
    buf_free(&b);
    return r;
}

static void test_api_wrong_types(void) {
    static const char *const values[] = {"0.5", "7", "true", "\"x\"", "[1.5]", "{\"a\":1}"};
    static const int right[] = {[API_NUMBER] = 3, [API_INTEGER] = 2, [API_BOOL] = 4, [API_TEXT] = 8, [API_LIST] = 16, [API_OBJECT] = 32};
    api_config m = api_test_model();
    int n = 0;
    for (int i = 0; i < COUNT(api_fields); i++)
        for (int route = 0; route < 4; route++) {
            const api_field *f = &api_fields[i];
            if (!(f->routes & 1 << route)) continue;
            for (int v = 0; v < COUNT(values); v++) {
                bool any = f->kind == API_ANY, refused = f->use == API_REFUSED;
                bool harmless = refused && f->harmless[0] && !strcmp(f->harmless[0], values[v]);
                if (harmless || (!refused && (any || right[f->kind] & 1 << v))) continue;
                api_refusal r = api_refuse_value(&m, (enum api_route)route, f->name, values[v]);
                CHECK_MSG(r.status == 400 && !strcmp(r.param, f->name) && str_starts(str_c(r.message), str_c(f->name)), "%s: %s: %d %s %s",
                          f->name, values[v], r.status, r.param, r.message);
                CHECK_MSG(!refused || !strcmp(r.code, "unsupported_parameter") || route >= API_TOKENIZE, "%s: %s", f->name, r.code);
                n++;
            }
            bool needed = api_is_needed((enum api_route)route, f->name);
            /* as if the field were absent */
            api_refusal r = api_refuse_value(&m, (enum api_route)route, f->name, "null");
            CHECK_MSG(r.status == (needed ? 400 : 0), "%s: null: %d %s", f->name, r.status, r.message);
        }
    CHECK_MSG(n > 300, "%d", n);
}

/* A number out of range: the message contains the number as it was written, and the one range that
 * is valid. */
static void test_api_ranges(void) {
    static const struct {
        enum api_route route;
        const char *param, *value, *message; /* NULL: accepted */
    } cases[] = {
        {API_COMPLETIONS, "n", "65", "n: 65, expected 1 to 64"}, {API_CHAT, "n", "65537", "n: 65537, expected 1 to 64"},
        {API_COMPLETIONS, "n", "1048577", "n: 1048577, expected 1 to 64"}, {API_CHAT, "n", "1e30", "n: 1e+30, expected 1 to 64"},
        {API_COMPLETIONS, "n", "-0", "n: 0, expected 1 to 64"}, {API_COMPLETIONS, "n", "6.4e1", NULL},
        {API_CHAT, "temperature", "1e39", "temperature: 1e+39, expected 0 to 3.40282e+38"},
        {API_CHAT, "temperature", "-1e39", "temperature: -1e+39, expected 0 or more"},
        {API_CHAT, "temperature", "1e-50", NULL}, {API_CHAT, "temperature", "-0.0", NULL},
        {API_CHAT, "temperature", "1000000000000000000000000000000000000000", "temperature: 1e+39, expected 0 to 3.40282e+38"},
        {API_COMPLETIONS, "top_p", "1e39", "top_p: 1e+39, expected more than 0 to 1"}, {API_CHAT, "top_p", "1e-50", NULL},
        {API_COMPLETIONS, "top_p", "-0.0", "top_p: -0, expected more than 0 to 1"},
        {API_COMPLETIONS, "min_p", "1e40", "min_p: 1e+40, expected 0 to 1"}, {API_COMPLETIONS, "min_p", "-0.0", NULL},
        {API_CHAT, "presence_penalty", "-1e300", "presence_penalty: -1e+300, expected -2 to 2"},
        {API_CHAT, "frequency_penalty", "1e39", "frequency_penalty: 1e+39, expected -2 to 2"},
        {API_CHAT, "repetition_penalty", "1e39", "repetition_penalty: 1e+39, expected 0.01 to 100"},
        {API_CHAT, "max_tokens", "1e30", "max_tokens: 1e+30, expected 1 to 128"},
        {API_COMPLETIONS, "max_tokens", "99999999999", "max_tokens: 99999999999, expected 0 to 128"},
        {API_COMPLETIONS, "min_tokens", "99999999999", "min_tokens: 99999999999, expected 0 to 128"},
        {API_COMPLETIONS, "min_tokens", "17", "min_tokens: 17, expected 0 to 16"},
        {API_COMPLETIONS, "best_of", "99999999999", "best_of other than n is not supported"},
        {API_COMPLETIONS, "logit_bias", "{\"55\":1e39}", "logit_bias: 1e+39, expected -100 to 100"},
        {API_COMPLETIONS, "logit_bias", "{\"55\":101}", "logit_bias: 101, expected -100 to 100"},
        {API_COMPLETIONS, "logit_bias", "{\"99999999999\":1}", "logit_bias: id 99999999999, expected 0 to 1023"},
        {API_COMPLETIONS, "logit_bias", "{\"99999999999999999999\":1}", "logit_bias: id 99999999999999999999, expected 0 to 1023"},
        {API_COMPLETIONS, "stop_token_ids", "[5,1e30]", "stop_token_ids[1]: 1e+30 is no token id, expected 0 to 1023"},
        {API_COMPLETIONS, "stop_token_ids", "[-1]", "stop_token_ids[0]: -1 is no token id, expected 0 to 1023"},
        {API_CHAT, "allowed_token_ids", "[4294967301]", "allowed_token_ids[0]: 4294967301 is no token id, expected 0 to 1023"},
        {API_CHAT, "allowed_token_ids", "[1.5]", "allowed_token_ids[0]: 1.5 is no token id, expected 0 to 1023"},
        {API_CHAT, "allowed_token_ids", "[5e0,-0,7.0]", NULL},
        {API_COMPLETIONS, "prompt", "[1e10]", "prompt[0]: 10000000000 is no token id, expected 0 to 1023"},
        {API_DETOKENIZE, "tokens", "[-5]", "tokens[0]: -5 is no token id, expected 0 to 1023"}};
    api_config m = api_test_model();
    for (int i = 0; i < COUNT(cases); i++) {
        api_refusal r = api_refuse_value(&m, cases[i].route, cases[i].param, cases[i].value);
        const char *want = cases[i].message ? cases[i].message : "";
        CHECK_MSG(!strcmp(r.message, want) && (!*want || !strcmp(r.param, cases[i].param)), "%s: %s: %s", cases[i].param, cases[i].value,
                  r.message);
    }
    api_refusal r = api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[[5],[6],[7]],\"n\":22}");
    CHECK_MSG(!strcmp(r.message, "n: 22 for each of 3 prompts, expected at most 64 in all"), "%s", r.message);
}

static void test_api_wrong_values(void) {
    static const struct {
        enum api_route route;
        const char *param, *value;
    } cases[] = {
        {API_COMPLETIONS, "prompt", "7"}, {API_COMPLETIONS, "prompt", "true"}, {API_COMPLETIONS, "prompt", "{\"a\":1}"},
        {API_COMPLETIONS, "prompt", "[]"}, {API_COMPLETIONS, "prompt", "[[]]"}, {API_COMPLETIONS, "prompt", "[\"a\",1]"},
        {API_COMPLETIONS, "prompt", "[1,\"a\"]"}, {API_COMPLETIONS, "prompt", "[1,-1]"}, {API_COMPLETIONS, "prompt", "[1.5]"},
        {API_COMPLETIONS, "prompt", "[[1],[\"a\"]]"}, {API_COMPLETIONS, "prompt", "[[1],[999999]]"}, {API_COMPLETIONS, "prompt", "[[[1]]]"},
        {API_COMPLETIONS, "prompt", "[null]"}, {API_COMPLETIONS, "temperature", "-1"}, {API_COMPLETIONS, "temperature", "1e300"},
        {API_COMPLETIONS, "top_p", "0"}, {API_COMPLETIONS, "top_p", "1.1"}, {API_COMPLETIONS, "min_p", "2"},
        {API_COMPLETIONS, "top_k", "-2"}, {API_COMPLETIONS, "top_k", "1e10"}, {API_COMPLETIONS, "repetition_penalty", "0"},
        {API_COMPLETIONS, "presence_penalty", "2.5"}, {API_COMPLETIONS, "frequency_penalty", "-3"}, {API_COMPLETIONS, "max_tokens", "0"},
        {API_COMPLETIONS, "max_tokens", "-1"}, {API_COMPLETIONS, "max_tokens", "1.5"}, {API_CHAT, "max_tokens", "0"},
        {API_CHAT, "max_completion_tokens", "0"}, {API_COMPLETIONS, "min_tokens", "17"}, {API_COMPLETIONS, "n", "0"},
        {API_COMPLETIONS, "n", "1048577"}, {API_COMPLETIONS, "n", "65"}, {API_COMPLETIONS, "best_of", "2"},
        {API_COMPLETIONS, "seed", "1e30"}, {API_COMPLETIONS, "logprobs", "101"}, {API_COMPLETIONS, "logprobs", "-1"},
        {API_CHAT, "top_logprobs", "2"}, {API_CHAT, "top_logprobs", "101"}, {API_COMPLETIONS, "prompt_logprobs", "101"},
        {API_COMPLETIONS, "stop", "[1]"}, {API_COMPLETIONS, "stop", "5"}, {API_COMPLETIONS, "stop", "\"\""},
        {API_COMPLETIONS, "stop", "\"a\\u0000b\""}, {API_COMPLETIONS, "stop_token_ids", "[999999]"},
        {API_COMPLETIONS, "stop_token_ids", "[-1]"}, {API_COMPLETIONS, "allowed_token_ids", "[999999]"},
        {API_COMPLETIONS, "logit_bias", "{\"x\":1}"}, {API_COMPLETIONS, "logit_bias", "{\"1\":101}"},
        {API_COMPLETIONS, "logit_bias", "{\"1\":\"a\"}"}, {API_COMPLETIONS, "logit_bias", "{\"999999\":1}"},
        {API_COMPLETIONS, "guided_json", "{\"type\":5}"}, {API_CHAT, "web_search_options", "{}"}, {API_COMPLETIONS, "guided_choice", "[]"},
        {API_CHAT, "response_format", "{}"}, {API_CHAT, "regex", "\"(\""}, {API_CHAT, "ebnf", "\"a\""}, {API_CHAT, "json_schema", "\"{\""},
        {API_CHAT, "logprob_token_ids", "[1]"}, {API_CHAT, "repetition_detection", "{}"}, {API_COMPLETIONS, "thinking_token_budget", "1"}, {API_CHAT, "thinking_token_budget", "-2"}, {API_COMPLETIONS, "bad_words", "[1]"}, {API_COMPLETIONS, "bad_words", "[\"\"]"},
        {API_COMPLETIONS, "stream_options", "{\"include_usage\":1}"}, {API_CHAT, "stream_options", "{\"include_obfuscation\":true}"},
        {API_CHAT, "tool_choice", "\"required\""}, {API_CHAT, "tool_choice", "\"always\""}, {API_CHAT, "tool_choice", "7"},
        {API_CHAT, "tool_choice", "{\"type\":\"function\"}"}, {API_CHAT, "messages", "[]"}, {API_CHAT, "messages", "[1]"},
        {API_CHAT, "messages", "[{\"content\":\"a\"}]"},
        {API_CHAT, "messages", "[{\"role\":\"user\",\"content\":1}]"}, {API_CHAT, "messages", "[{\"role\":1,\"content\":\"a\"}]"}, {API_CHAT, "messages", "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]"},
        {API_CHAT, "response_format", "{\"type\":\"json_schema\"}"}, {API_TOKENIZE, "prompt", "[1]"}, {API_DETOKENIZE, "tokens", "[1.5]"},
        {API_DETOKENIZE, "tokens", "[999999]"}};
    api_config m = api_test_model();
    for (int i = 0; i < COUNT(cases); i++) {
        api_refusal r = api_refuse_value(&m, cases[i].route, cases[i].param, cases[i].value);
        CHECK_MSG(r.status == 400 && !strcmp(r.param, cases[i].param), "%s: %s: %d %s %s", cases[i].param, cases[i].value, r.status,
                  r.param, r.message);
    }
    buf b = {0};
    buf_c(&b, "{\"prompt\":[5");
    for (int i = 0; i < 128; i++) buf_c(&b, ",5");
    buf_c(&b, "]}");
    api_refusal r = api_refuse(&m, API_COMPLETIONS, b.p);
    CHECK(r.status == 400 && !strcmp(r.code, "context_length_exceeded") && !strcmp(r.param, "prompt"));
    /* the length is 128 */
    r = api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[5,6],\"max_tokens\":127}");
    CHECK(r.status == 400 && !strcmp(r.code, "context_length_exceeded") && !strcmp(r.param, "max_tokens"));
    CHECK(!strcmp(r.message, "max_tokens: 127 after a prompt of 2 tokens, expected at most 126 (max_model_len 128)"));
    CHECK(!api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[5,6],\"max_tokens\":126}").status);
    CHECK(api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[[5],[5,6]],\"max_tokens\":127}").status == 400);
    CHECK(!strcmp(api_refuse_value(&m, API_CHAT, "max_completion_tokens", "2000000000").param, "max_completion_tokens"));
    /* it is read as a whole number */
    r = api_refuse_value(&m, API_COMPLETIONS, "seed", "9223372036854775808");
    CHECK_MSG(!strcmp(r.message, "seed: 9.22337e+18, expected -9223372036854775808 to 9223372036854775807"), "%s", r.message);
    buf_clear(&b), buf_c(&b, "{\"prompt\":[5");
    for (int i = 1; i < 120; i++) buf_c(&b, ",5");
    buf_c(&b, "]}");
    /* the default of 16 becomes the number of tokens that are left */
    CHECK(!api_refuse(&m, API_COMPLETIONS, b.p).status);
    r = api_refuse_value(&m, API_CHAT, "model", "\"gpt\"");
    CHECK(r.status == 404 && !strcmp(r.code, "model_not_found") && !strcmp(r.param, "model"));
    CHECK(!api_refuse_value(&m, API_CHAT, "model", "\"other\"").status);
    CHECK(api_refuse(&m, API_CHAT, "{\"messages\"").status == 400 && api_refuse(&m, API_CHAT, "[]").status == 400);
    CHECK(!api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[5],\"max_tokens\":0,\"echo\":true}").status);
    CHECK(!api_refuse(&m, API_COMPLETIONS, "{\"prompt\":[5],\"max_tokens\":3.0,\"n\":64}").status);
    buf_free(&b);
}

static int api_n_unknown;
static void api_count_unknown(void *user, str name) {
    api_n_unknown += user == &api_n_unknown && (str_is(name, "colour") || str_is(name, "stream_options.colour"));
}

static void test_api_unknown_fields(void) {
    static const char *const beside[] = {"custom_id", NULL};
    api_config m = api_test_model();
    m.on_unknown_field = api_count_unknown, m.user = &api_n_unknown;
    CHECK(!api_refuse_value(&m, API_COMPLETIONS, "colour", "1").status && api_n_unknown == 1);
    m.strict = true;
    api_refusal r = api_refuse_value(&m, API_COMPLETIONS, "colour", "1");
    CHECK(r.status == 400 && strstr(r.message, "colour") && api_n_unknown == 1);
    r = api_refuse_value(&m, API_CHAT, "stream_options", "{\"include_usage\":true,\"include_obfuscation\":false,\"colour\":1}");
    CHECK(r.status == 400 && strstr(r.message, "stream_options.colour: ") && !strcmp(r.param, "stream_options"));
    m.strict = false;
    CHECK(!api_refuse_value(&m, API_CHAT, "stream_options", "{\"colour\":null,\"include_usage\":null},\"stream\":true").status && api_n_unknown == 2);
    r = api_refuse_value(&m, API_CHAT, "stream_options", "{\"include_usage\":true},\"stream\":false");
    CHECK(r.status == 400 && strstr(r.message, "without stream") && !strcmp(r.param, "stream_options"));
    m.strict = true;
    m.caller_fields = beside;
    CHECK(!api_refuse_value(&m, API_COMPLETIONS, "custom_id", "1").status);
    /* a field of another route is unknown here */
    CHECK(api_refuse_value(&m, API_CHAT, "prompt", "1").status == 400);
}

/* ---- Bodies to requests ---- */

static void test_api_requests(void) {
    api_config m = api_test_model();
    m.defaults.sampling.temperature = 0.25f, m.defaults.sampling.seed = 3;
    toka_err e = {0};
    api_request c = {.serial = {1, 2}}, d = {.serial = {1, 3}};
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":[[5,6],[7]],\"n\":3,\"top_k\":4,\"top_p\":0.5,\"stop\":\"ab\","
                     "\"stop_token_ids\":[9,8],\"logit_bias\":{\"4\":7,\"6\":1,\"04\":8,\"4\":-2.5},\"priority\":2,\"ignore_eos\":true}"), &c, &e));
    CHECK(c.n_prompts == 2 && c.n_choices == 6 && c.n_left == 6 && c.n_prompt_tokens == 3 && c.prompts[1].first_choice == 3 && !c.stream);
    const toka_request *q = &c.prompts[0].engine_request;
    const toka_sampling *s = &q->sampling;
    CHECK(q->n == 3 && q->n_ids == 2 && q->ids[1] == 6 && q->priority == -2 && q->ids_only && s->top_k == 4 && s->top_p == 0.5f);
    CHECK(s->temperature == 0.25f && s->max_tokens == 16 && s->n_stop == 1 && !strcmp(s->stop[0], "ab") && s->stop_ids[1] == 8);
    CHECK(s->n_bias == 2 && s->bias_ids[0] == 4 && s->bias_values[0] == -2.5f && s->bias_ids[1] == 6 && s->ignore_eos);
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":[\"Tom\",\"Tom\"]}"), &d, &e));
    /* prompts do not share random numbers */
    CHECK(s->seed != c.prompts[1].engine_request.sampling.seed && s->seed != d.prompts[0].engine_request.sampling.seed);
    api_free(&c), api_free(&d);
    c = (api_request){.serial = {1, 2}};
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":[\"Tom\",\"Ann\"],\"seed\":-2,\"max_tokens\":0,\"echo\":true,\"n\":2}"), &c, &e));
    CHECK(c.prompts[1].engine_request.sampling.seed == UINT64_MAX - 1 && c.prompts[0].engine_request.n == 0 && c.prompts[0].engine_request.prompt_logprobs && c.n_choices == 4);
    api_free(&c);
    for (int i = 0; i < 2; i++) { /* -1 means none, as in vLLM */
        api_request *of = i ? &d : &c;
        *of = (api_request){.serial = {1, 2 + (uint64_t)i}};
        CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":\"Tom\",\"seed\":-1}"), of, &e));
    }
    CHECK(c.prompts[0].engine_request.sampling.seed != d.prompts[0].engine_request.sampling.seed && c.prompts[0].engine_request.sampling.seed != UINT64_MAX);
    api_free(&c), api_free(&d);
    c = (api_request){.serial = {1, 2}};
    CHECK(!api_parse(&m, API_CHAT, STR("{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}],\"max_tokens\":4,\"max_completion_tokens\":5}"),
                     &c, &e));
    CHECK(c.prompts[0].engine_request.sampling.max_tokens == 5 && c.chat);
    api_free(&c);
    for (int i = 0; i < 2; i++) { /* no sum of priorities overflows */
        c = (api_request){.serial = {1, 2}};
        m.defaults.priority = i ? 1000 : -1000;
        CHECK(!api_parse(&m, API_COMPLETIONS, i ? STR("{\"prompt\":[5],\"priority\":-2147483647}") : STR("{\"prompt\":[5],\"priority\":2147483647}"), &c, &e));
        CHECK(c.prompts[0].engine_request.priority == (i ? INT_MAX : -INT_MAX));
        api_free(&c);
    }
}

/* The engine computes log-probabilities for calls that show them, and for no others. */
static void test_api_wants_logprobs(void) {
    static const struct {
        enum api_route route;
        const char *fields;
        int logprobs;
    } cases[] = {{API_COMPLETIONS, "", TOKA_NO_LOGPROBS}, {API_COMPLETIONS, ",\"logprobs\":null", TOKA_NO_LOGPROBS},
                {API_COMPLETIONS, ",\"logprobs\":0", 0}, {API_COMPLETIONS, ",\"logprobs\":3", 3},
                {API_COMPLETIONS, ",\"return_token_ids\":true,\"stream\":true", TOKA_NO_LOGPROBS},
                {API_COMPLETIONS, ",\"return_packed\":true", 0}, {API_COMPLETIONS, ",\"return_packed\":true,\"logprobs\":2", 2},
                {API_COMPLETIONS, ",\"prompt_logprobs\":2,\"echo\":true", TOKA_NO_LOGPROBS}, {API_CHAT, "", TOKA_NO_LOGPROBS},
                {API_CHAT, ",\"logprobs\":false", TOKA_NO_LOGPROBS}, {API_CHAT, ",\"logprobs\":true", 0},
                {API_CHAT, ",\"logprobs\":true,\"top_logprobs\":4", 4}, {API_CHAT, ",\"return_packed\":true", 0}};
    api_config m = api_test_model();
    for (int i = 0; i < COUNT(cases); i++) {
        api_request c = {.serial = {1, 2}};
        toka_err e;
        buf b = {0};
        buf_printf(&b, "{%s%s}", cases[i].route == API_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}]" : "\"prompt\":[5]",
                   cases[i].fields);
        CHECK(!api_parse(&m, cases[i].route, buf_view(&b), &c, &e));
        CHECK_MSG(c.prompts[0].engine_request.sampling.logprobs == cases[i].logprobs, "%s: %d", b.p,
            c.prompts[0].engine_request.sampling.logprobs);
        api_free(&c), buf_free(&b);
    }
}

static void test_api_bad_words(void) {
    api_config m = api_test_model();
    toka_err e = {0};
    api_request c = {.serial = {1, 2}};
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":[[5],[6]],\"bad_words\":[\" apples\",\"each of the\"]}"), &c, &e));
    const toka_words *w = c.prompts[1].engine_request.sampling.bad_words;
    CHECK(w && w == c.prompts[0].engine_request.sampling.bad_words && w->n_words == 2 && str_is(w->words[0], "apples") && str_is(w->words[1], "each of the"));
    api_free(&c);
    c = (api_request){.serial = {1, 2}}; /* a special token becomes its id, not its letters */
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":\"Tom\",\"bad_words\":[\"<|im_end|>\"]}"), &c, &e));
    const int32_t end = tok_id(m.toka->tokenizer, STR("<|im_end|>"));
    w = c.prompts[0].engine_request.sampling.bad_words;
    CHECK(end >= 0 && w && w->table.n_whole == 1 && w->table.ends[0].id == end);
    api_free(&c);
    c = (api_request){.serial = {1, 2}}; /* its letters are no token */
    CHECK(!api_parse(&m, API_COMPLETIONS, STR("{\"prompt\":\"Tom\",\"bad_words\":[\"end\",\"im\",\"text\"]}"), &c, &e));
    w = c.prompts[0].engine_request.sampling.bad_words;
    CHECK(w->table.n_whole > 1);
    for (int i = 0; i < w->table.n_ends; i++) CHECK(!(m.toka->tokenizer->flag[w->table.ends[i].id] & TOK_SPECIAL));
    api_free(&c);
    CHECK(!api_refuse_value(&m, API_COMPLETIONS, "bad_words", "[]").status);
    CHECK(!strcmp(api_refuse_value(&m, API_CHAT, "bad_words", "[\"a\",\"  \"]").message, "bad_words[1]: a word without tokens"));
    CHECK(!strcmp(api_refuse_value(&m, API_CHAT, "bad_words", "[\"a\\u0000b\"]").message, "bad_words: expected a list of texts"));
    buf b = {0};
    buf_c(&b, "[\"a\"");
    for (int i = 0; i < SAMP_MAX_BAD_TEXTS; i++) buf_c(&b, ",\"a\"");
    buf_c(&b, "]");
    CHECK(!strcmp(api_refuse_value(&m, API_CHAT, "bad_words", b.p).message, "bad_words: 2049 words, expected 1 to 2048"));
    buf_clear(&b), buf_c(&b, "[\"");
    for (int i = 0; i <= SAMP_MAX_BAD_BYTES; i++) buf_char(&b, 'a');
    buf_c(&b, "\"]");
    CHECK(!strcmp(api_refuse_value(&m, API_CHAT, "bad_words", b.p).message, "bad_words: 32769 bytes, expected at most 32768 in all"));
    buf_free(&b);
}

/* A list that forbids every allowed id is refused, as far as this is known. Id 55 is T; 3 and 1 are
 * end ids. */
static void test_api_no_token_allowed(void) {
    static const struct {
        const char *fields, *error_field; /* NULL: accepted */
    } cases[] = {
        {"\"allowed_token_ids\":[55],\"bad_words\":[\"T\"]", "bad_words"}, {"\"allowed_token_ids\":[55,56],\"bad_words\":[\"T\"]", NULL},
        {"\"allowed_token_ids\":[55,56,55],\"bad_words\":[\"U\",\" T\"]", "bad_words"},
        {"\"allowed_token_ids\":[55],\"bad_words\":[\"TT\"]", NULL}, {"\"allowed_token_ids\":[55],\"logit_bias\":{\"55\":-100}", "logit_bias"},
        {"\"allowed_token_ids\":[55],\"logit_bias\":{\"55\":-99}", NULL}, {"\"allowed_token_ids\":[3,1],\"min_tokens\":1", "min_tokens"},
        {"\"allowed_token_ids\":[3,1],\"min_tokens\":1,\"ignore_eos\":true", NULL}, {"\"allowed_token_ids\":[3,1]", NULL},
        {"\"allowed_token_ids\":[55],\"stop_token_ids\":[55],\"min_tokens\":2", "min_tokens"},
        {"\"allowed_token_ids\":[55],\"stop_token_ids\":[55]", NULL},
        {"\"allowed_token_ids\":[55,56,1],\"bad_words\":[\"T\"],\"logit_bias\":{\"56\":-1e2},\"min_tokens\":1", "min_tokens and bad_words and logit_bias"},
        {"\"allowed_token_ids\":[55],\"bad_words\":[\"T\"],\"max_tokens\":0,\"echo\":true", NULL}};
    api_config m = api_test_model();
    for (int i = 0; i < COUNT(cases); i++) {
        buf b = {0};
        char want[200] = "";
        if (cases[i].error_field)
            snprintf(want, sizeof want, "allowed_token_ids: nothing is left to draw, as %s forbid%s all of these ids",
                cases[i].error_field,
                     strchr(cases[i].error_field, ' ') ? "" : "s");
        buf_printf(&b, "{\"prompt\":\"Tom\",%s}", cases[i].fields);
        api_refusal r = api_refuse(&m, API_COMPLETIONS, b.p);
        CHECK_MSG(r.status == (*want ? 400 : 0) && !strcmp(r.message, want), "%s: %d %s", b.p, r.status, r.message);
        CHECK(!*want || !strcmp(r.param, "allowed_token_ids"));
        buf_free(&b);
    }
    buf b = {0}; /* without a list of allowed ids all are allowed */
    buf_c(&b, "{\"prompt\":\"Tom\",\"min_tokens\":1,\"stop_token_ids\":[0");
    for (int i = 1; i < 1024; i++) buf_printf(&b, ",%d", i);
    buf_c(&b, "]}");
    CHECK(!strcmp(api_refuse(&m, API_COMPLETIONS, b.p).message, "min_tokens: nothing is left to draw, as min_tokens forbids all of these ids"));
    buf_free(&b);
}

static void api_check_context(const char *body, const char *want) {
    api_config m = api_test_model();
    api_request c = {.config = &m, .chat = true};
    api_body b;
    toka_err e = {0};
    buf out = {0};
    const json *v = json_parse(&c.memory, str_c(body), m.limits, &e);
    int code = api_read_body(&c, API_CHAT, v, &b, &e);
    if (!code) code = api_put_chat_context(&c, &b, &out, &e);
    CHECK_MSG(!code && str_is(buf_view(&out), want), "%s %s", e.msg, out.p);
    buf_free(&out), api_free(&c);
}

static void test_api_context(void) {
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}],"
                      "\"name\":\"n\"}],\"tools\":[{\"t\":1,\"function\":{\"name\":\"f\"}}],\"documents\":[2],\"chat_template_kwargs\":{\"k\":true}}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\\nb\",\"name\":\"n\"}],\"add_generation_prompt\":true,"
                      "\"tools\":[{\"t\":1,\"function\":{\"name\":\"f\"}}],\"documents\":[2],\"k\":true}");
    api_check_context("{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"x\",\"function\":{\"name\":\"f\","
                      "\"arguments\":\"{\\\"a\\\": [1, {}]}\"}},{\"function\":{\"name\":\"g\",\"arguments\":\"broken\"}}]}],"
                      "\"tools\":[{\"t\":1,\"function\":{\"name\":\"f\"}}],\"tool_choice\":\"none\",\"add_generation_prompt\":false}",
                      "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"x\",\"function\":{\"name\":\"f\","
                      "\"arguments\":{\"a\":[1,{}]}}},{\"function\":{\"name\":\"g\",\"arguments\":\"broken\"}}]}],"
                      "\"add_generation_prompt\":false}");
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[]}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"add_generation_prompt\":true}");
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"function\":{\"name\":\"f\"},\"a\":1.0,\"b\":[0.0,-0.0,1e2,1],\"c\":0.5,\"d\":1E20}]}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"add_generation_prompt\":true,\"tools\":[{\"function\":{\"name\":\"f\"},\"a\":1.0,"
                      /* 1.0 and 1 are different texts */
                      "\"b\":[0.0,-0.0,100.0,1],\"c\":0.5,\"d\":1e+20}]}");
    /* what clients send back from an answer */
    api_check_context("{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"refusal\":null,\"tool_calls\":null},"
                      "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]},{\"role\":\"assistant\",\"tool_calls\":["
                      "{\"function\":{\"name\":\"f\",\"arguments\":\"\"}},{\"function\":{\"name\":\"g\",\"arguments\":null}}]}]}",
                      "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"\"},"
                      "{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{}}},"
                      "{\"function\":{\"name\":\"g\",\"arguments\":{}}}],\"content\":\"\"}],\"add_generation_prompt\":true}");
}

/* A message needs a content, unless it is the assistant's. */
static void test_api_contents(void) {
    api_config m = api_test_model();
    for (int i = 0; i < 4; i++) {
        static const char *const roles[] = {"user", "system", "tool", "assistant"};
        buf body = {0};
        buf_printf(&body, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"%s\"}]}", roles[i]);
        api_refusal r = api_refuse(&m, API_CHAT, body.p);
        CHECK_MSG(i == 3 ? !r.status : r.status == 400 && strstr(r.message, "a role and a content"), "%s: %d %s", roles[i], r.status, r.message);
        buf_free(&body);
    }
    /* texts in all forms that clients send */
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":[\"a\",{\"type\":\"input_text\",\"text\":\"b\"},{\"type\":\"text\",\"text\":null}]},"
                      "{\"role\":\"assistant\",\"content\":[{\"type\":\"refusal\",\"refusal\":\"no\"},{\"type\":\"output_text\",\"text\":\"c\"}]}]}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\\nb\"},{\"role\":\"assistant\",\"content\":\"no\\nc\"}],"
                      "\"add_generation_prompt\":true}");
    static const char *const others[] = {"{\"type\":\"image_url\",\"image_url\":{}}", "{\"type\":\"text\"}", "{\"type\":\"refusal\",\"text\":\"a\"}", "1"};
    for (int i = 0; i < COUNT(others); i++) {
        buf body = {0};
        buf_printf(&body, "{\"messages\":[{\"role\":\"user\",\"content\":[%s]}]}", others[i]);
        api_refusal r = api_refuse(&m, API_CHAT, body.p);
        CHECK_MSG(r.status == 400 && strstr(r.message, "other than text"), "%s: %d %s", others[i], r.status, r.message);
        buf_free(&body);
    }
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":null}]}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"\"}],\"add_generation_prompt\":true}");
}

/* A model with two templates renders a chat that has tools with the second one. */
static void test_api_tool_template(void) {
    toka_err e;
    toka two = *api_text_model();
    CHECK(!tmpl_parse(&two.chat_template, STR("plain"), &e) && !tmpl_parse(&two.tool_template, STR("with {{ tools | length }}"), &e));
    buf out = {0};
    CHECK(!lib_render(&two, two.files, STR("{\"messages\":[]}"), json_trusted, "2025-01-01 00:00:00", &out, &e) && !strcmp(out.p, "plain"));
    buf_clear(&out);
    CHECK(!lib_render(&two, two.files, STR("{\"messages\":[],\"tools\":[1,2]}"), json_trusted, "2025-01-01 00:00:00", &out, &e));
    CHECK(!strcmp(out.p, "with 2"));
    buf_clear(&out);
    CHECK(!lib_render(&two, two.files, STR("{\"messages\":[],\"tools\":[]}"), json_trusted, "2025-01-01 00:00:00", &out, &e));
    CHECK(!strcmp(out.p, "with 0"));
    buf_clear(&out);
    CHECK(!lib_render(&two, two.files, STR("{\"messages\":[],\"tools\":null}"), json_trusted, "2025-01-01 00:00:00", &out, &e) && !strcmp(out.p, "plain"));
    tmpl_del(two.chat_template), tmpl_del(two.tool_template), buf_free(&out);
}

/* Several texts of one message are passed as a list to a template that loops over them, and as one
 * text to any other. The texts of a tool are always passed as one. */
static void test_api_text_lists(void) {
    static const struct { const char *chat, *want; } cases[] = {
        {"{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb|c5\n6"},
        {"{% for m in messages %}{{ m.content | trim }}{% endfor %}", "a\nb|c5\n6"},
        {"{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}", "<a><><b>|c5\n6"},
        {"{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endif %}{% endfor %}", "<a><><b>|c5\n6"},
        {"{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}<{{ p.text }}>{% endfor %}{% endif %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "<a><><b>|c5\n6"}};
    for (int i = 0; i < COUNT(cases); i++) {
        toka two = *api_text_model();
        api_config m = api_test_model();
        api_request c = {.config = &m, .chat = true};
        api_body b;
        toka_err e = {0};
        buf context = {0}, out = {0};
        m.toka = &two, two.tool_template = NULL;
        CHECK(!tmpl_parse(&two.chat_template, str_c(cases[i].chat), &e));
        const json *v = json_parse(&c.memory, STR("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
                                             "\"text\":\"\"},{\"type\":\"text\",\"text\":\"b\"}]},{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"|c\"}]},"
                                             "{\"role\":\"tool\",\"content\":[{\"type\":\"text\",\"text\":\"5\"},{\"type\":\"text\",\"text\":\"6\"}]}]}"),
                                   m.limits, &e);
        int code = api_read_body(&c, API_CHAT, v, &b, &e);
        if (!code) code = api_put_chat_context(&c, &b, &context, &e);
        if (!code) code = lib_render(&two, two.files, buf_view(&context), m.limits, m.now, &out, &e);
        CHECK_MSG(!code && str_is(buf_view(&out), cases[i].want), "%d: %s %s", i, e.msg, out.p);
        tmpl_del(two.chat_template), buf_free(&context), buf_free(&out), api_free(&c);
    }
}

/* ---- Made-up events ---- */

typedef struct api_fake_answer { /* a made-up answer of one sample */
    int32_t id[16];
    int n;
    bool stops; /* ends by an end id, which has no text */
} api_fake_answer;

/* One event of a sample, or of a prompt (f NULL). Alternatives are the ids after the token's
 * own. */
static void api_put_event(const api_prompt *p, int sample, const api_fake_answer *f, int i, buf *records) {
    int32_t top_ids[TOKA_MAX_LOGPROBS];
    float top[TOKA_MAX_LOGPROBS];
    bool last = i + 1 == (f ? f->n : (int)p->ids.n);
    toka_event ev = {.sample = sample, .id = f ? f->id[i] : p->ids.p[i], .logprob = -(float)(i + 1) / 4, .sampled_logprob = -(float)i / 8,
                     .top_ids = top_ids, .top_logprobs = top, .stop_id = -1, .stop_text = -1, .n_cached = 2};
    ev.n_top = f ? MAX(p->engine_request.sampling.logprobs, 0) : i ? p->engine_request.prompt_top : 0;
    for (int k = 0; k < ev.n_top; k++) top_ids[k] = ev.id + k, top[k] = ev.logprob - (float)k;
    if (!f && i && p->engine_request.prompt_ranks) ev.rank = ev.n_top ? 1 : 70 + i;
    if (f && p->engine_request.sampling.logprobs < 0) ev.logprob = NAN; /* not shown */
    if (f && last) ev.finish = f->stops ? TOKA_STOP : TOKA_LENGTH, ev.stop_id = f->stops ? ev.id : -1;
    if (!f && last && !p->engine_request.n) ev.finish = TOKA_LENGTH;
    api_pack_event(p, &ev, records);
}

static void api_must_parse(const api_config *m, enum api_route route, const char *body, api_request *c) {
    toka_err e = {0};
    *c = (api_request){.serial = {0x11, 0x22}, .created = 1700000000};
    if (api_parse(m, route, str_c(body), c, &e)) printf("%s: %s\n", body, e.msg), check_failed++;
}

/* The answer to one prompt whose samples all have the same ids. */
static void api_answer(const api_config *m, enum api_route route, const char *body, const api_fake_answer *f, buf *out) {
    api_request c;
    api_must_parse(m, route, body, &c);
    buf records = {0};
    for (int k = 0; k < c.n_prompts; k++) {
        for (size_t i = 0; c.prompts[k].engine_request.prompt_logprobs && i < c.prompts[k].ids.n; i++)
            api_put_event(&c.prompts[k], TOKA_PROMPT, NULL, (int)i, &records);
        for (int s = 0; s < c.prompts[k].engine_request.n; s++)
            for (int i = 0; i < f->n; i++) api_put_event(&c.prompts[k], s, f, i, &records);
    }
    api_feed(&c, buf_view(&records), out);
    CHECK(c.n_left == 0);
    CHECK(api_finish(&c, out) == 200);
    buf_free(&records), api_free(&c);
}

static void api_golden(const api_config *m, enum api_route route, const char *body, const api_fake_answer *f, const char *want) {
    buf out = {0};
    api_answer(m, route, body, f, &out);
    CHECK_MSG(str_is(buf_view(&out), want), "\n  got  %s\n  want %s", out.p, want);
    buf_free(&out);
}

static api_fake_answer api_fake_text(const char *text) {
    api_fake_answer f = {0};
    ids v = {0};
    toka_err e;
    CHECK(!tok_encode(api_text_model()->tokenizer, str_c(text), 0, &v, &e) && v.n <= 16);
    f.n = (int)MIN(v.n, (size_t)16);
    memcpy(f.id, v.p, (size_t)f.n * sizeof *f.id);
    ids_free(&v);
    return f;
}

#define API_HEAD(id, object) \
    "{\"id\":\"" id "00000000000000110000000000000022\",\"object\":\"" object "\",\"created\":1700000000,\"model\":\"m\"," \
    "\"system_fingerprint\":\"fp\",\"choices\":["
#define API_USAGE(in, out, all, cached) \
    "\"usage\":{\"prompt_tokens\":" in ",\"completion_tokens\":" out ",\"total_tokens\":" all \
    ",\"prompt_tokens_details\":{\"cached_tokens\":" cached "}}}"

static void test_api_golden_whole(void) {
    api_config m = api_test_model();
    api_fake_answer f = api_fake_text("12");
    CHECK(f.n == 2);
    api_golden(&m, API_COMPLETIONS, "{\"prompt\":[5,6,7],\"logprobs\":1,\"return_token_ids\":true}", &f,
               API_HEAD("cmpl-", "text_completion") "{\"index\":0,\"text\":\"12\",\"logprobs\":{\"tokens\":[\"1\",\"2\"],"
               "\"token_logprobs\":[-0.25,-0.5],\"top_logprobs\":[{\"1\":-0.25},{\"2\":-0.5}],\"text_offset\":[0,1]},"
               "\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[20,21],\"prompt_token_ids\":[5,6,7]}],"
               API_USAGE("3", "2", "5", "2"));
    api_golden(&m, API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}],\"logprobs\":true,\"n\":2}", &f,
               API_HEAD("chatcmpl-", "chat.completion")
               "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"12\",\"refusal\":null},\"logprobs\":{\"content\":["
               "{\"token\":\"1\",\"logprob\":-0.25,\"bytes\":[49],\"top_logprobs\":[]},"
               "{\"token\":\"2\",\"logprob\":-0.5,\"bytes\":[50],\"top_logprobs\":[]}],\"refusal\":null},"
               "\"finish_reason\":\"length\",\"stop_reason\":null},"
               "{\"index\":1,\"message\":{\"role\":\"assistant\",\"content\":\"12\",\"refusal\":null},\"logprobs\":{\"content\":["
               "{\"token\":\"1\",\"logprob\":-0.25,\"bytes\":[49],\"top_logprobs\":[]},"
               "{\"token\":\"2\",\"logprob\":-0.5,\"bytes\":[50],\"top_logprobs\":[]}],\"refusal\":null},"
               "\"finish_reason\":\"length\",\"stop_reason\":null}]," API_USAGE("11", "4", "15", "2"));
    f.stops = true;
    api_golden(&m, API_COMPLETIONS, "{\"prompt\":[20,21],\"echo\":true,\"logprobs\":0,\"prompt_logprobs\":0,\"stop_token_ids\":[21]}", &f,
               API_HEAD("cmpl-", "text_completion") "{\"index\":0,\"text\":\"121\",\"logprobs\":{\"tokens\":[\"1\",\"2\",\"1\",\"2\"],"
               "\"token_logprobs\":[null,-0.5,-0.25,-0.5],\"top_logprobs\":[null,{\"2\":-0.5},{\"1\":-0.25},{\"2\":-0.5}],"
               "\"text_offset\":[0,1,2,3]},\"finish_reason\":\"stop\",\"stop_reason\":21,"
               "\"prompt_logprobs\":[null,{\"21\":{\"logprob\":-0.5,\"rank\":71,\"decoded_token\":\"2\"}}]}],"
               API_USAGE("2", "2", "4", "2"));
    m.live = false, f.stops = false;
    api_fake_answer special = {.id = {20, m.toka->files->config.eos_ids[0], 21}, .n = 3};
    buf kept = {0}, plain = {0};
    api_answer(&m, API_COMPLETIONS, "{\"prompt\":[5],\"skip_special_tokens\":false}", &special, &kept);
    api_answer(&m, API_COMPLETIONS, "{\"prompt\":[5]}", &special, &plain);
    CHECK(!strstr(kept.p, "\"text\":\"12\"") && strstr(kept.p, "\"text\":\"1<") && strstr(plain.p, "\"text\":\"12\""));
    buf_free(&kept), buf_free(&plain);
    api_golden(&m, API_COMPLETIONS, "{\"prompt\":[20],\"echo\":true,\"max_tokens\":0}", &f,
               "{\"id\":\"cmpl-00000000000000110000000000000022\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\","
               "\"choices\":[{\"index\":0,\"text\":\"1\",\"logprobs\":null,\"finish_reason\":\"length\"}],"
               "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":0,\"total_tokens\":1}}");
}

static void test_api_golden_stream(void) {
    api_config m = api_test_model();
    api_fake_answer f = api_fake_text("12");
    f.stops = true;
    api_golden(&m, API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}],\"stream\":true,"
               "\"stream_options\":{\"include_usage\":true}}", &f,
               "data: " API_HEAD("chatcmpl-", "chat.completion.chunk") "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
               "\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}],\"usage\":null}\n\n"
               "data: " API_HEAD("chatcmpl-", "chat.completion.chunk") "{\"index\":0,\"delta\":{\"content\":\"1\"},"
               "\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}],\"usage\":null}\n\n"
               "data: " API_HEAD("chatcmpl-", "chat.completion.chunk") "{\"index\":0,\"delta\":{},"
               "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":null}\n\n"
               "data: " API_HEAD("chatcmpl-", "chat.completion.chunk") "]," API_USAGE("11", "2", "13", "2") "\n\ndata: [DONE]\n\n");
    f.stops = false, m.live = false;
    api_golden(&m, API_COMPLETIONS, "{\"prompt\":[20],\"echo\":true,\"logprobs\":0,\"stream\":true,\"max_tokens\":2}",
               &(api_fake_answer){.id = {21}, .n = 1},
               "data: {\"id\":\"cmpl-00000000000000110000000000000022\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\","
               "\"choices\":[{\"index\":0,\"text\":\"1\",\"logprobs\":{\"tokens\":[\"1\"],\"token_logprobs\":[null],\"top_logprobs\":[null],"
               "\"text_offset\":[0]},\"finish_reason\":null}]}\n\n"
               "data: {\"id\":\"cmpl-00000000000000110000000000000022\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\","
               "\"choices\":[{\"index\":0,\"text\":\"2\",\"logprobs\":{\"tokens\":[\"2\"],\"token_logprobs\":[-0.25],"
               "\"top_logprobs\":[{\"2\":-0.25}],\"text_offset\":[1]},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n");
}

/* ---- Streams against whole answers ---- */

typedef struct api_whole { /* a choice, joined from the chunks of a stream */
    buf text, tokens, values, top, offsets, chat, ids;
    char finish[16];
} api_whole;

static void api_join_list(const json *list, buf *to) { /* elements without the brackets */
    if (json_is(list, JSON_ARRAY)) JSON_EACH(it, list) json_put_value(to, it);
}

static void api_join(const json *choice, api_whole *w) {
    const json *lp = json_get(choice, "logprobs"), *message = json_get(choice, "message"), *delta = json_get(choice, "delta");
    str finish = json_str(json_get(choice, "finish_reason"));
    buf_str(&w->text, json_str(json_get(choice, "text")));
    buf_str(&w->text, json_str(json_get(message ? message : delta, "content")));
    api_join_list(json_get(lp, "tokens"), &w->tokens), api_join_list(json_get(lp, "token_logprobs"), &w->values);
    api_join_list(json_get(lp, "top_logprobs"), &w->top), api_join_list(json_get(lp, "text_offset"), &w->offsets);
    api_join_list(json_get(lp, "content"), &w->chat), api_join_list(json_get(choice, "token_ids"), &w->ids);
    if (finish.n) snprintf(w->finish, sizeof w->finish, "%.*s", STRF(finish));
}

static void api_join_choices(const json *root, api_whole *w, int n) {
    const json *choices = json_get(root, "choices");
    CHECK(json_is(choices, JSON_ARRAY));
    JSON_EACH(it, choices) {
        int64_t i = json_int(json_get(it, "index"), -1);
        CHECK(i >= 0 && i < n);
        if (i >= 0 && i < n) api_join(it, &w[i]);
    }
}

static void api_join_stream(str s, api_whole *w, int n) {
    bool done = false;
    while (s.n) {
        ptrdiff_t end = str_find(s, STR("\n\n"), 0);
        CHECK(end > 6 && str_starts(s, STR("data: ")) && !done);
        if (end < 0) return;
        arena a = {0};
        toka_err e = {0};
        str chunk = str_sub(s, 6, (size_t)end);
        done = str_is(chunk, "[DONE]");
        /* a chunk that cuts a character is not valid JSON */
        const json *v = done ? NULL : json_parse(&a, chunk, json_trusted, &e);
        CHECK_MSG(done || v, "%s", e.msg);
        if (v) api_join_choices(v, w, n);
        arena_free(&a);
        s = str_sub(s, (size_t)end + 2, s.n);
    }
    CHECK(done);
}

static void api_same_choice(api_whole *a, api_whole *b, const char *body) {
    buf *x[] = {&a->text, &a->tokens, &a->values, &a->top, &a->offsets, &a->chat, &a->ids};
    buf *y[] = {&b->text, &b->tokens, &b->values, &b->top, &b->offsets, &b->chat, &b->ids};
    for (int i = 0; i < COUNT(x); i++) {
        CHECK_MSG(str_eq(buf_view(x[i]), buf_view(y[i])), "part %d of %s:\n  %s\n  %s", i, body, buf_view(x[i]).p, buf_view(y[i]).p);
        buf_free(x[i]), buf_free(y[i]);
    }
    CHECK(!strcmp(a->finish, b->finish) && a->finish[0]);
}

/* Puts the events of all samples in a random order. Those of a prompt come somewhere between,
 * because sample 0 may be late. */
static void api_shuffle(const api_request *c, const api_fake_answer *f, uint64_t *rng, buf *records) {
    int at[64] = {0}, at_prompt[8] = {0}, left = 0;
    for (int k = 0; k < c->n_prompts; k++) {
        left += c->prompts[k].engine_request.n * 100;
        left += c->prompts[k].engine_request.prompt_logprobs ? (int)c->prompts[k].ids.n * 100 : 0;
    }
    for (int tries = 0; tries < left * 20; tries++) {
        int k = (int)(rnd(rng) % (uint64_t)c->n_prompts);
        const api_prompt *p = &c->prompts[k];
        int n_prompt = p->engine_request.prompt_logprobs ? (int)p->ids.n : 0, s = (int)(rnd(rng) % (uint64_t)(c->n_samples + 1)) - 1;
        if (s < 0 && at_prompt[k] < n_prompt) api_put_event(p, TOKA_PROMPT, NULL, at_prompt[k]++, records);
        int i = p->first_choice + s;
        if (s < 0 || s >= p->engine_request.n || at[i] >= f[i].n || (s == 0 && at_prompt[k] < n_prompt)) continue;
        api_put_event(p, s, &f[i], at[i]++, records);
    }
}

/* Feeds records in pieces of random length, each record whole. A stream sometimes gets little space
 * for text. */
static void api_feed_pieces(api_request *c, str records, uint64_t *rng, buf *out) {
    while (records.n) {
        size_t n = 0, one, most = out && rnd(rng) % 2 ? out->n + 1 + rnd(rng) % 1000 : SIZE_MAX;
        str rest;
        do {
            api_unpack_record(str_sub(records, n, records.n), &rest, &one);
            n += one;
        } while (n < records.n && rnd(rng) % 3);
        n = api_feed_until(c, str_sub(records, 0, n), most, out);
        CHECK(n);
        records = str_sub(records, n, records.n);
    }
}

static void api_random_body(uint64_t *rng, bool chat, buf *b) {
    static const char *const prompts[] = {"\"Tom\"", "[\"Tom\",\"na\\u00efve \\u6f22\\ud83d\\ude00\"]", "[5,6]", "[[5],[6,7,8],[20]]"};
    bool lp = rnd(rng) % 2;
    buf_clear(b);
    if (chat) buf_c(b, "{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}]");
    else buf_printf(b, "{\"prompt\":%s", prompts[rnd(rng) % COUNT(prompts)]);
    buf_printf(b, ",\"n\":%d", 1 + (int)(rnd(rng) % 3));
    if (lp && chat) buf_printf(b, ",\"logprobs\":true,\"top_logprobs\":%d", (int)(rnd(rng) % 4));
    if (lp && !chat) buf_printf(b, ",\"logprobs\":%d", (int)(rnd(rng) % 4));
    if (!chat && rnd(rng) % 3 == 0) buf_c(b, rnd(rng) % 3 ? ",\"echo\":true" : ",\"echo\":true,\"max_tokens\":0");
    if (rnd(rng) % 3 == 0) buf_c(b, ",\"return_token_ids\":true");
    if (rnd(rng) % 5 == 0) buf_c(b, ",\"return_tokens_as_token_ids\":true");
}

static void test_api_stream_equals_whole(void) {
    api_config m = api_test_model();
    uint64_t rng = 7;
    /* ids that are parts of characters */
    api_fake_answer letters = api_fake_text("\xE6\xBC\xA2\xF0\x9F\x98\x80 a");
    for (int round = 0; round < 600 && !check_failed; round++) {
        bool chat = rnd(&rng) % 2;
        enum api_route route = chat ? API_CHAT : API_COMPLETIONS;
        buf body = {0}, records = {0}, out = {0};
        api_random_body(&rng, chat, &body);
        size_t open = body.n;
        buf_c(&body, "}");
        api_request c, d;
        api_must_parse(&m, route, body.p, &c);
        body.n = open, buf_c(&body, ",\"stream\":true");
        if (rnd(&rng) % 4 == 0) buf_c(&body, ",\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}");
        buf_c(&body, "}");
        api_must_parse(&m, route, body.p, &d);
        api_fake_answer f[64];
        for (int i = 0; i < c.n_choices; i++) {
            f[i] = (api_fake_answer){.n = 1 + (int)(rnd(&rng) % 12), .stops = rnd(&rng) % 2};
            for (int k = 0; k < f[i].n; k++)
                f[i].id[k] = rnd(&rng) % 2 ? letters.id[rnd(&rng) % (uint64_t)letters.n] : (int32_t)(rnd(&rng) % (uint64_t)m.toka->tokenizer->n_ids);
        }
        api_shuffle(&c, f, &rng, &records);
        api_feed_pieces(&c, buf_view(&records), &rng, NULL);
        CHECK(c.n_left == 0 && api_finish(&c, &out) == 200);
        api_whole whole[64] = {0}, joined[64] = {0};
        arena a = {0};
        toka_err e = {0};
        const json *v = json_parse(&a, buf_view(&out), json_trusted, &e);
        CHECK_MSG(v, "%s", e.msg);
        if (v) api_join_choices(v, whole, c.n_choices);
        buf_clear(&out);
        api_feed_pieces(&d, buf_view(&records), &rng, &out);
        CHECK(d.n_left == 0);
        api_finish(&d, &out);
        api_join_stream(buf_view(&out), joined, c.n_choices);
        for (int i = 0; i < c.n_choices; i++) api_same_choice(&whole[i], &joined[i], body.p);
        CHECK(c.n_output_tokens == d.n_output_tokens && c.n_cached_tokens == d.n_cached_tokens);
        arena_free(&a), buf_free(&body), buf_free(&records), buf_free(&out), api_free(&c), api_free(&d);
    }
}

/* The bytes of the tokens of a chat, joined, are the text's, wherever a token's end cuts a
 * character. */
static void test_api_bytes(void) {
    static const char text[] = "na\xC3\xAFve \xE6\xBC\xA2\xF0\x9F\x98\x80";
    api_config m = api_test_model();
    api_fake_answer f = api_fake_text(text);
    buf out = {0}, bytes = {0};
    arena a = {0};
    toka_err e;
    api_answer(&m, API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}],\"logprobs\":true}", &f, &out);
    const json *choice = json_at(json_get(json_parse(&a, buf_view(&out), json_trusted, &e), "choices"), 0);
    const json *content = json_get(json_get(choice, "logprobs"), "content");
    CHECK(json_is(content, JSON_ARRAY) && content->n == (uint32_t)f.n && f.n > 8);
    JSON_EACH(it, content) JSON_EACH(byte, json_get(it, "bytes")) buf_char(&bytes, (char)json_int(byte, 0));
    CHECK_MSG(str_is(buf_view(&bytes), text), "%s", bytes.p);
    CHECK(str_is(json_str(json_get(json_get(choice, "message"), "content")), text));
    buf_clear(&out), buf_clear(&bytes);
    f.n--; /* the last character is incomplete; offsets count characters where they begin */
    api_answer(&m, API_COMPLETIONS, "{\"prompt\":[5],\"logprobs\":0}", &f, &out);
    choice = json_at(json_get(json_parse(&a, buf_view(&out), json_trusted, &e), "choices"), 0);
    const json *offsets = json_get(json_get(choice, "logprobs"), "text_offset");
    CHECK(str_ends(json_str(json_get(choice, "text")), STR("\xE6\xBC\xA2\xEF\xBF\xBD")));
    for (int i = 0; i < f.n; i++) {
        CHECK(json_int(json_at(offsets, (size_t)i), -1) == utf8_count(buf_view(&bytes)));
        tok_put_bytes(m.toka->tokenizer, f.id[i], &bytes);
    }
    CHECK(utf8_count(STR("na\xC3\xAFve")) == 5);
    buf_free(&out), buf_free(&bytes), arena_free(&a);
}

static size_t api_base64(str s, unsigned char *out) { /* number of bytes */
    size_t n = 0;
    for (size_t i = 0; i + 4 <= s.n; i += 4) {
        uint32_t w = 0;
        int pad = 0;
        for (size_t k = 0; k < 4; k++) {
            char c = s.p[i + k];
            int v = c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : c >= '0' && c <= '9' ? c - '0' + 52 : c == '+' ? 62 : 63;
            pad += c == '=';
            w = w << 6 | (c == '=' ? 0u : (uint32_t)v);
        }
        for (int k = 0; k < 3 - pad; k++) out[n++] = (unsigned char)(w >> (16 - 8 * k));
    }
    return n;
}

/* Without a tokenizer, or for ids beyond it, tokens have no text; alternatives must still be
 * distinguishable. */
static void test_api_tokens_without_text(void) {
    api_config m = api_test_model();
    toka no_tokenizer = *m.toka;
    arena a = {0};
    toka_err e;
    no_tokenizer.tokenizer = NULL, m.toka = &no_tokenizer;
    for (int chat = 0; chat < 2; chat++) {
        api_fake_answer f = api_fake_text("12");
        buf out = {0}, first = {0}, second = {0};
        if (chat) m.toka = api_text_model(), f.id[0] = f.id[1] = m.toka->tokenizer->n_ids + 5;
        api_answer(&m, API_COMPLETIONS, "{\"prompt\":[5,6,7],\"logprobs\":2}", &f, &out);
        const json *choice = json_at(json_get(json_parse(&a, buf_view(&out), json_trusted, &e), "choices"), 0);
        const json *l = json_get(choice, "logprobs"), *top = json_at(json_get(l, "top_logprobs"), 0);
        buf_printf(&first, "token_id:%d", (int)f.id[0]), buf_printf(&second, "token_id:%d", (int)f.id[0] + 1);
        CHECK_MSG(str_is(json_str(json_at(json_get(l, "tokens"), 0)), first.p), "%s", out.p);
        CHECK(json_get(top, first.p) && json_get(top, second.p));
        buf_free(&out), buf_free(&first), buf_free(&second);
    }
    arena_free(&a);
}

static void test_api_packed(void) {
    api_config m = api_test_model();
    api_fake_answer f = api_fake_text("12");
    buf out = {0};
    arena a = {0};
    toka_err e;
    unsigned char raw[64];
    int32_t id[4], top[4];
    float lp[4];
    api_answer(&m, API_COMPLETIONS, "{\"prompt\":[5,6,7],\"logprobs\":2,\"return_packed\":true,\"return_token_ids\":true}", &f, &out);
    const json *choice = json_at(json_get(json_parse(&a, buf_view(&out), json_trusted, &e), "choices"), 0), *p = json_get(choice, "packed");
    CHECK(json_int(json_get(p, "n"), 0) == 2 && json_int(json_get(p, "top_n"), 0) == 2 && json_is(json_get(choice, "logprobs"), JSON_NULL));
    CHECK(!json_get(choice, "token_ids") && json_is(json_get(p, "sampled_logprobs"), JSON_STRING));
    CHECK(api_base64(json_str(json_get(p, "token_ids")), raw) == 8);
    memcpy(id, raw, 8);
    CHECK(api_base64(json_str(json_get(p, "logprobs")), raw) == 8);
    memcpy(lp, raw, 8);
    CHECK(id[0] == f.id[0] && id[1] == f.id[1] && lp[0] == -0.25f && lp[1] == -0.5f);
    CHECK(api_base64(json_str(json_get(p, "top_ids")), raw) == 16);
    memcpy(top, raw, 16);
    CHECK(top[0] == id[0] && top[1] == id[0] + 1 && top[2] == id[1]);
    p = json_get(choice, "prompt_packed");
    CHECK(api_base64(json_str(json_get(p, "token_ids")), raw) == 12);
    memcpy(id, raw, 12);
    CHECK(id[0] == 5 && id[1] == 6 && id[2] == 7 && json_int(json_get(p, "top_n"), -1) == 0);
    CHECK(api_base64(json_str(json_get(p, "logprobs")), raw) == 12);
    memcpy(lp, raw, 12);
    CHECK(isnan(lp[0]) && isnan(lp[1]) && isnan(lp[2])); /* none was requested, so there is none */
    /* echo with logprobs also gives those of the prompt */
    for (int stream = 0; stream < 2; stream++) {
        buf body = {0};
        buf_printf(&body, "{\"prompt\":[5,6,7],\"logprobs\":1,\"echo\":true,\"return_packed\":true,\"stream\":%s}", stream ? "true" : "false");
        buf_clear(&out);
        api_answer(&m, API_COMPLETIONS, body.p, &f, &out);
        str first = buf_view(&out);
        if (stream) first = str_sub(first, 6, (size_t)str_find(first, STR("\n"), 0)); /* data: */
        choice = json_at(json_get(json_parse(&a, first, json_trusted, &e), "choices"), 0), p = json_get(choice, "prompt_packed");
        CHECK_MSG(json_int(json_get(p, "n"), 0) == 3 && json_int(json_get(p, "top_n"), 0) == 1, "%s", out.p);
        CHECK(api_base64(json_str(json_get(p, "logprobs")), raw) == 12);
        memcpy(lp, raw, 12);
        CHECK(lp[1] < 0 && lp[2] < 0 && api_base64(json_str(json_get(p, "top_ids")), raw) == 12);
        buf_free(&body);
    }
    buf_free(&out), arena_free(&a);
}

/* Events that break a call: cancelled in the middle, also while tokens wait for those of the
 * prompt; prompts that the engine did not accept. */
static void test_api_broken(void) {
    api_config m = api_test_model();
    api_fake_answer f = api_fake_text("12");
    toka_event gone = {.sample = 0, .id = -1, .finish = TOKA_CANCELLED, .stop_id = -1, .stop_text = -1};
    buf records = {0}, out = {0};
    api_request c;
    api_must_parse(&m, API_COMPLETIONS, "{\"prompt\":[5,6,7],\"n\":2}", &c);
    api_put_event(&c.prompts[0], 0, &f, 0, &records);
    api_pack_event(&c.prompts[0], &gone, &records);
    gone.sample = 1, gone.finish = TOKA_FAILED;
    api_pack_event(&c.prompts[0], &gone, &records);
    api_feed(&c, buf_view(&records), &out);
    CHECK(!c.n_left && !out.n && api_finish(&c, &out) == 500 && strstr(out.p, "\"type\":\"server_error\""));
    api_free(&c), buf_clear(&records), buf_clear(&out);
    api_must_parse(&m, API_COMPLETIONS, "{\"prompt\":[5,6,7],\"n\":2,\"echo\":true,\"logprobs\":1,\"stream\":true}", &c);
    api_put_event(&c.prompts[0], 1, &f, 0, &records), api_put_event(&c.prompts[0], 1, &f, 1, &records);
    api_feed(&c, buf_view(&records), &out);
    CHECK(c.n_left == 2 && !out.n); /* the prompt's events are missing */
    gone.sample = 0, gone.finish = TOKA_CANCELLED;
    buf_clear(&records), api_pack_event(&c.prompts[0], &gone, &records);
    api_feed(&c, buf_view(&records), &out);
    CHECK(!c.n_left && c.failure == TOKA_CANCELLED);
    api_finish(&c, &out);
    CHECK(strstr(out.p, "data: {\"error\":") && str_ends(buf_view(&out), STR("data: [DONE]\n\n")));
    api_free(&c), buf_clear(&records), buf_clear(&out);
    api_must_parse(&m, API_COMPLETIONS, "{\"prompt\":[[5],[6]],\"n\":3,\"max_tokens\":0,\"echo\":true}", &c);
    api_pack_ends(&c.prompts[0], TOKA_CANCELLED, &records), api_pack_ends(&c.prompts[1], TOKA_CANCELLED, &records);
    api_feed(&c, buf_view(&records), &out);
    CHECK(!c.n_left && api_finish(&c, &out) == 503);
    api_free(&c), buf_free(&records), buf_free(&out);
}

static void test_api_small_routes(void) {
    api_config m = api_test_model();
    toka_err e;
    buf out = {0};
    api_fault f;
    CHECK(!api_answer_tokenize(&m, API_TOKENIZE, STR("{\"prompt\":\"12\",\"add_special_tokens\":false,\"return_token_strs\":true}"), &out, &e, &f));
    CHECK_MSG(!strcmp(out.p, "{\"count\":2,\"max_model_len\":128,\"tokens\":[20,21],\"token_strs\":[\"1\",\"2\"]}"), "%s", out.p);
    buf_clear(&out);
    CHECK(!api_answer_tokenize(&m, API_TOKENIZE, STR("{\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}]}"), &out, &e, &f));
    CHECK(str_starts(buf_view(&out), STR("{\"count\":11,")) && str_ends(buf_view(&out), STR("\"token_strs\":null}")));
    buf_clear(&out);
    CHECK(!api_answer_tokenize(&m, API_DETOKENIZE, STR("{\"tokens\":[20,21]}"), &out, &e, &f));
    CHECK_MSG(!strcmp(out.p, "{\"prompt\":\"12\"}"), "%s", out.p);
    buf_clear(&out);
    CHECK(api_put_models(&m, STR(""), 5, &out) && strstr(out.p, "\"object\":\"list\"") && strstr(out.p, "\"id\":\"other\""));
    CHECK(api_put_models(&m, STR("other"), 5, &out) && !api_put_models(&m, STR("none"), 5, &out));
    buf_clear(&out);
    api_put_error(&out, 429, "full", NULL, NULL, "x");
    CHECK(!strcmp(out.p, "{\"error\":{\"message\":\"full\",\"type\":\"rate_limit_error\",\"param\":null,\"code\":\"x\"}}"));
    buf_free(&out);
}

/* Chapters 43 and 44: the engine accepted one prompt of two, and that one had a token before it was
 * cancelled. One answer is sent. */
static void test_api_refused_prompt(void) {
    api_config m = api_test_model();
    srv s = {0};
    http_request r = {.minor = 1};
    srv_request c = {.server = &s, .http = &r, .refs = 1, .state = SRV_RUNNING, .submit_error = {.code = TOKA_E_DEVICE, .msg = "it broke"}};
    buf records = {0}, made = {0};
    bool last = false;
    api_must_parse(&m, API_COMPLETIONS, "{\"prompt\":[\"Tom\",\"Ann\"],\"stream\":true}", &c.api);
    api_put_event(&c.api.prompts[0], 0, &(api_fake_answer){{20, 21}, 2, false}, 0, &records);
    CHECK(srv_make_output(&c, buf_view(&records), &last, &made) == records.n && !made.n && !last && !c.head_sent);
    last = true;
    srv_make_output(&c, STR(""), &last, &made);
    CHECK(last && str_starts(buf_view(&made), STR("HTTP/1.1 500 ")));
    buf_free(&records), buf_free(&made), api_free(&c.api);
}

/* ---- Tool calls and reasoning ---- */

#define API_TOOLS "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\",\"parameters\":{\"properties\":{\"i\":{\"type\":\"integer\"}}}}}]"
#define API_ASK "\"messages\":[{\"role\":\"user\",\"content\":\"Tom\"}]"

/* The answer to a chat whose template has the marks of Hermes and of <think>. Each piece of `text`
 * (they end with a |) is one token. */
static void api_parsed_answer(const char *body, const char *text, const char *end_of_prompt, bool stops, buf *out) {
    toka_err e;
    toka thinker = *api_text_model();
    buf source = {0};
    buf_printf(&source, "{%%- if tools %%}{{ tools[0].function.name }}{%% endif %%}{%% set marks = '<tool_call><think></think>' %%}Tom%s", end_of_prompt);
    CHECK(!tmpl_parse(&thinker.chat_template, buf_view(&source), &e));
    api_config m = api_test_model();
    m.toka = &thinker, m.max_len = 1024;
    api_request c;
    api_must_parse(&m, API_CHAT, body, &c);
    buf records = {0};
    for (int s = 0; c.n_prompts && s < c.prompts[0].engine_request.n; s++) {
        str rest = str_c(text), piece;
        while (str_split_next(&rest, '|', &piece)) {
            toka_event ev = {.sample = s, .id = 20, .logprob = -0.5f, .stop_id = -1, .stop_text = -1, .text = piece.p, .text_bytes = (int)piece.n};
            if (!rest.n) ev.finish = stops ? TOKA_STOP : TOKA_LENGTH;
            api_pack_event(&c.prompts[0], &ev, &records);
        }
    }
    api_feed(&c, buf_view(&records), out);
    CHECK(c.n_left == 0 && api_finish(&c, out) == 200);
    buf_free(&records), api_free(&c), buf_free(&source), tmpl_del(thinker.chat_template);
}

static void api_parsed_golden(const char *body, const char *text, const char *end_of_prompt, bool stops, const char *want) {
    buf out = {0};
    api_parsed_answer(body, text, end_of_prompt, stops, &out);
    CHECK_MSG(strstr(out.p, want), "\n  got  %s\n  want %s", out.p, want);
    buf_free(&out);
}

/* The deltas of a stream, one a line, with finish_reason. */
static void api_parsed_deltas(const char *body, const char *text, const char *end_of_prompt, bool stops, const char *want) {
    buf out = {0}, got = {0};
    api_parsed_answer(body, text, end_of_prompt, stops, &out);
    for (str s = buf_view(&out); s.n;) {
        const ptrdiff_t end = str_find(s, STR("\n\n"), 0);
        arena a = {0};
        toka_err e;
        const json *chunk = json_parse(&a, str_sub(s, 6, (size_t)end), json_trusted, &e), *choice = json_at(json_get(chunk, "choices"), 0);
        if (choice) {
            json_put_value(&got, json_get(choice, "delta"));
            if (json_get(choice, "finish_reason")->type == JSON_STRING) buf_char(&got, ' '), buf_str(&got, json_str(json_get(choice, "finish_reason")));
            buf_char(&got, '\n');
        }
        arena_free(&a);
        s = str_sub(s, (size_t)end + 2, s.n);
    }
    CHECK_MSG(str_is(buf_view(&got), want), "\n  got  %s\n  want %s", got.p, want);
    buf_free(&out), buf_free(&got);
}

static const char api_two_calls[] = "Ok|.\n<tool|_call>{\"name\": \"f\", \"argu|ments\": {\"i\": 1}}|</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>|";
#define API_ID1 "call_SGgia02mdH8c3EVYobuv1jIm"
#define API_ID2 "call_8YvxRnx9nPkpf3OBmgKvi1Fk"

static void test_api_tool_calls(void) {
    api_parsed_golden("{" API_ASK "," API_TOOLS "}", api_two_calls, "", true,
                      "\"message\":{\"role\":\"assistant\",\"content\":\"Ok.\",\"refusal\":null,\"tool_calls\":["
                      "{\"id\":\"" API_ID1 "\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"i\\\": 1}\"}},"
                      "{\"id\":\"" API_ID2 "\",\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":\"{}\"}}]},"
                      "\"logprobs\":null,\"finish_reason\":\"tool_calls\",\"stop_reason\":");
    api_parsed_deltas("{" API_ASK "," API_TOOLS ",\"stream\":true}", api_two_calls, "", true,
                      "{\"role\":\"assistant\",\"content\":\"\"}\n{\"content\":\"Ok\"}\n{\"content\":\".\"}\n"
                      "{\"tool_calls\":[{\"index\":0,\"id\":\"" API_ID1 "\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}\n"
                      "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"i\\\": 1}\"}}]}\n"
                      "{\"tool_calls\":[{\"index\":1,\"id\":\"" API_ID2 "\",\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":\"\"}}]}\n"
                      "{\"tool_calls\":[{\"index\":1,\"function\":{\"arguments\":\"{}\"}}]}\n{} tool_calls\n");
    /* one call only; no tools, or none to be called: text; cut off: text */
    api_parsed_golden("{" API_ASK "," API_TOOLS ",\"parallel_tool_calls\":false}", api_two_calls, "", true, "1}\"}}]},\"logprobs\"");
    api_parsed_golden("{" API_ASK "," API_TOOLS ",\"tool_choice\":\"none\"}", api_two_calls, "", true, "\"content\":\"Ok.\\n<tool_call>{");
    api_parsed_golden("{" API_ASK "}", api_two_calls, "", true, "</tool_call>\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"stop\"");
    api_parsed_golden("{" API_ASK "," API_TOOLS "}", "<tool_call>{\"name\": |", "", false,
                      "\"content\":\"<tool_call>{\\\"name\\\": \",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"length\"");
    api_parsed_golden("{" API_ASK "," API_TOOLS "}", "<tool_call>{\"name\":\"f\"}</tool_call>|", "", true, "\"content\":null,\"refusal\":null,\"tool_calls\":[{");
    /* two samples have parsers of their own, and ids of their own */
    buf out = {0};
    api_parsed_answer("{" API_ASK "," API_TOOLS ",\"n\":2}", api_two_calls, "", true, &out);
    const char *first = strstr(out.p, "\"id\":\"call_"), *other = first ? strstr(first, "\"index\":1") : NULL;
    CHECK(first && other && strstr(other, "call_") && !strstr(other, API_ID1) && !strstr(other, API_ID2));
    buf_free(&out);
}

static void test_api_tool_choice(void) {
    api_config m = api_test_model();
    m.parsing.tool_parser = "hermes";
    static const char *const allowed = "{" API_ASK "," API_TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":\"%s\",\"tools\":"
                                       "[{\"type\":\"function\",\"function\":{\"name\":\"%s\"}}]}}}";
    static const struct {
        const char *mode, *name;
        int status;
    } rows[] = {{"auto", "f", 0}, {"auto", "g", 400}, {"required", "f", 0}, {"required", "g", 400}, {"never", "f", 400}};
    for (int i = 0; i < COUNT(rows); i++) {
        char body[1000];
        snprintf(body, sizeof body, allowed, rows[i].mode, rows[i].name);
        api_refusal r = api_refuse(&m, API_CHAT, body);
        CHECK_MSG(r.status == rows[i].status && (!r.status || !strcmp(r.param, "tool_choice")), "%d: %s", r.status, r.message);
    }
    api_check_context("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"function\":{\"name\":\"f\"}},{\"function\":{\"name\":\"g\"}}],"
                      "\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":\"auto\",\"tools\":[{\"function\":{\"name\":\"g\"}}]}}}",
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"add_generation_prompt\":true,\"tools\":[{\"function\":{\"name\":\"g\"}}]}");
}

static void test_api_reasoning(void) {
    static const char text[] = "<think>|\nI add|.\n</thi|nk>\n\n|It is 3.|";
    api_parsed_golden("{" API_ASK "}", text, "", true,
                      "\"message\":{\"role\":\"assistant\",\"content\":\"It is 3.\",\"refusal\":null,\"reasoning\":\"I add.\",\"reasoning_content\":\"I add.\"},");
    api_parsed_golden("{" API_ASK "}", text, "", true, "\"completion_tokens_details\":{\"reasoning_tokens\":4}}");
    api_parsed_golden("{" API_ASK ",\"include_reasoning\":false}", text, "", true, "\"content\":\"It is 3.\",\"refusal\":null},");
    api_parsed_deltas("{" API_ASK ",\"stream\":true}", text, "", true,
                      "{\"role\":\"assistant\",\"content\":\"\"}\n{\"reasoning\":\"I add\",\"reasoning_content\":\"I add\"}\n"
                      "{\"reasoning\":\".\",\"reasoning_content\":\".\"}\n{\"content\":\"It is 3.\"} stop\n");
    api_parsed_deltas("{" API_ASK ",\"stream\":true,\"include_reasoning\":false}", text, "", true,
                      "{\"role\":\"assistant\",\"content\":\"\"}\n{\"content\":\"It is 3.\"} stop\n");
    /* the prompt ends inside the reasoning; it never ends */
    api_parsed_golden("{" API_ASK "}", "I add.</think>3|", "<think>\n", true, "\"content\":\"3\",\"refusal\":null,\"reasoning\":\"I add.\"");
    api_parsed_golden("{" API_ASK "}", "I add|", "<think>\n", false, "\"content\":null,\"refusal\":null,\"reasoning\":\"I add\"");
    api_parsed_golden("{" API_ASK "}", "I add|", "<think></think>", false, "\"content\":\"I add\",\"refusal\":null},");
    /* effort and kwargs reach the template; the body's kwargs win */
    api_check_context("{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\"},{\"role\":\"assistant\",\"content\":\"b\","
                      "\"reasoning_content\":\"s\"}],\"reasoning_effort\":\"none\",\"chat_template_kwargs\":{\"enable_thinking\":true}}",
                      "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"r\",\"reasoning_content\":\"r\",\"thinking\":\"r\"},"
                      "{\"role\":\"assistant\",\"content\":\"b\",\"reasoning_content\":\"s\",\"reasoning\":\"s\",\"thinking\":\"s\"}],\"add_generation_prompt\":true,"
                      "\"reasoning_effort\":\"none\",\"enable_thinking\":false,\"thinking\":false,\"enable_thinking\":true}");
    api_config m = api_test_model();
    CHECK(api_refuse_value(&m, API_CHAT, "reasoning_effort", "\"huge\"").status == 400);
    toka_err e;
    arena a = {0};
    api_body b;
    buf out = {0};
    m.parsing.kwargs = json_parse(&a, STR("{\"k\":1}"), json_trusted, &e);
    api_request c = {.config = &m, .chat = true};
    const json *body = json_parse(&a, STR("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}"), json_trusted, &e);
    CHECK(!api_read_body(&c, API_CHAT, body, &b, &e) && !api_put_chat_context(&c, &b, &out, &e) && strstr(out.p, ",\"k\":1}"));
    buf_free(&out), arena_free(&a), api_free(&c);
}

/* Special tokens are skipped, but not those of a call. */
static void test_api_special_tokens_of_calls(void) {
    toka special = *api_text_model();
    const int32_t eos = special.files->config.eos_ids[0];
    const parse_format format = {.names = "x ", .call = "%c"};
    api_request c = {.parses = true, .config = &(api_config){.toka = &special}, .parse = {.format = &format}};
    api_prompt prompt = {.request = &c};
    CHECK(api_skips_token(&c, &prompt, eos) && !api_skips_token(&c, &prompt, 20));
    char open[100];
    snprintf(open, sizeof open, "[%.*s", STRF(special.tokenizer->text[eos]));
    const parse_format with = {.names = "x ", .call = "%c", .open = open};
    c.parse.format = &with;
    CHECK(!api_skips_token(&c, &prompt, eos));
    c.parse.format = &format, prompt.engine_request.keep_special = true;
    CHECK(!api_skips_token(&c, &prompt, eos));
}

/* Tokenizers and chat templates as models have them: an answer comes as ids, its tags are special tokens or not. */
static void test_api_calls_of_models(void) {
    static const struct {
        const char *tokenizer, *template, *more, *text, *want;
    } rows[] = {
        {"qwen3", "Qwen-Qwen3-0.6B.jinja", "", "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"i\": 1}}\n</tool_call><|im_end|>",
         "\"content\":null,\"refusal\":null,\"reasoning\":\"Hm.\",\"reasoning_content\":\"Hm.\",\"tool_calls\":[{"},
        {"qwen3", "Qwen-Qwen3-0.6B.jinja", ",\"reasoning_effort\":\"none\"", "Hi.<|im_end|>", "\"content\":\"Hi.\",\"refusal\":null}"},
        {"deepseek-v3", "deepseek-ai-DeepSeek-V3.1.jinja", "", "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"i\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
         "\"content\":\"Ok.\",\"refusal\":null,\"tool_calls\":[{"},
        {"deepseek-v3", "deepseek-ai-DeepSeek-V3.1.jinja", ",\"chat_template_kwargs\":{\"thinking\":true}", "Hm.</think>Ok.", "\"content\":\"Ok.\",\"refusal\":null,\"reasoning\":\"Hm.\""},
        {"llama-3.1", "meta-llama-Llama-3.1-8B-Instruct.jinja", "", "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"i\": 1}}<|eom_id|>", "\"content\":null,\"refusal\":null,\"tool_calls\":[{"},
        {"gpt-oss", "openai-gpt-oss-120b.jinja", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"i\": 1}",
         "\"content\":null,\"refusal\":null,\"reasoning\":\"Hm.\",\"reasoning_content\":\"Hm.\",\"tool_calls\":[{"},
        {"qwen2.5", "Qwen-Qwen2.5-7B-Instruct.jinja", "", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"i\": 1}}\n</tool_call>", "\"content\":null,\"refusal\":null,\"tool_calls\":[{"}};
    for (int i = 0; i < COUNT(rows); i++) {
        char name[200], body[500];
        toka_err e;
        ids tokens = {0};
        api_request c;
        snprintf(name, sizeof name, "tokenizers/%s/tokenizer.json", rows[i].tokenizer);
        const char *json_path = data_path(name);
        snprintf(name, sizeof name, "templates/%s", rows[i].template);
        const char *template_path = data_path(name);
        if (!json_path || !template_path) {
            SKIP(1, "no public test data");
            continue;
        }
        const str source = read_copy(template_path), text = read_copy(json_path);
        toka model = *api_text_model();
        mf_model files = *model.files;
        CHECK(!tok_load(&model.tokenizer, text, STR(""), &e) && !tmpl_parse(&model.chat_template, source, &e));
        model.shape.V = files.shape.V = files.config.shape.V = model.tokenizer->n_ids;
        model.files = &files;
        api_config m = api_test_model();
        m.toka = &model, m.max_len = 100000;
        snprintf(body, sizeof body, "{" API_ASK "," API_TOOLS "%s}", rows[i].more);
        api_must_parse(&m, API_CHAT, body, &c);
        CHECK(!tok_encode(model.tokenizer, str_c(rows[i].text), TOKA_PARSE_SPECIAL, &tokens, &e));
        buf records = {0}, out = {0};
        for (size_t k = 0; k < tokens.n; k++) {
            toka_event ev = {.id = tokens.p[k], .stop_id = -1, .stop_text = -1, .finish = k + 1 < tokens.n ? TOKA_RUNNING : TOKA_STOP};
            api_pack_event(&c.prompts[0], &ev, &records);
        }
        api_feed(&c, buf_view(&records), &out);
        CHECK(api_finish(&c, &out) == 200);
        CHECK_MSG(strstr(out.p, rows[i].want) && (!strstr(rows[i].want, "tool_calls") || strstr(out.p, "\"name\":\"f\",\"arguments\":\"{\\\"i\\\": 1}\"")),
                  "%s %s: %s", rows[i].tokenizer, rows[i].more, out.p);
        buf_free(&records), buf_free(&out), ids_free(&tokens), api_free(&c);
        tok_del(model.tokenizer), tmpl_del(model.chat_template), free((void *)source.p), free((void *)text.p);
    }
}

static const struct test api_tests[] = {
    {"api: calls of models", test_api_calls_of_models},
    {"api: tool calls", test_api_tool_calls},
    {"api: tool_choice", test_api_tool_choice},
    {"api: reasoning", test_api_reasoning},
    {"api: special tokens of calls", test_api_special_tokens_of_calls},
    {"api: every field, every wrong type", test_api_wrong_types},
    {"api: wrong values", test_api_wrong_values},
    {"api: numbers beyond their range", test_api_ranges},
    {"api: unknown fields", test_api_unknown_fields},
    {"api: bodies to requests", test_api_requests},
    {"api: requests with log-probabilities", test_api_wants_logprobs},
    {"api: bad words", test_api_bad_words},
    {"api: no token is allowed", test_api_no_token_allowed},
    {"api: what templates get", test_api_context},
    {"api: messages without a content", test_api_contents},
    {"api: template for tools", test_api_tool_template},
    {"api: texts of a message", test_api_text_lists},
    {"api: whole answers", test_api_golden_whole},
    {"api: streams", test_api_golden_stream},
    {"api: a stream is the whole answer", test_api_stream_equals_whole},
    {"api: bytes of tokens", test_api_bytes},
    {"api: packed arrays", test_api_packed},
    {"api: tokens without a text", test_api_tokens_without_text},
    {"api: broken calls", test_api_broken},
    {"api: a refused prompt", test_api_refused_prompt},
    {"api: tokenize, models, errors", test_api_small_routes},
    {NULL, NULL}};
