/* fuzz_template.c - libFuzzer entry: byte 0 selects a context, the rest is the template; limits are
 * small. For any input, rendering ends with an output within its limit or with an error that names
 * a line. */

static const char *const fuzz_contexts[] = {
    "{}",
    "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi \\u00e9\\u4f60\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":"
    "[{\"id\":\"x\",\"function\":{\"name\":\"f\",\"arguments\":{\"a\":1}}}]}],\"tools\":null,"
    "\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}",
    "{\"a\":[1,2.5,-3,true,null,\"x'y\",[],{}],\"b\":{\"k\":1,\"items\":[2]},\"c\":\" <a> \","
    "\"d\":9223372036854775807,\"e\":\"\"}",
    "{\"a\":[[1,2],[3,4]],\"b\":[{\"n\":\"B\",\"v\":1},{\"n\":\"a\",\"v\":2}],\"c\":\"a,b,,c\\nd\",\"d\":-1,\"e\":1e300}",
};

static int fuzz_template(const uint8_t *data, size_t size) {
    static const tmpl_limits limits = {200000, 60, 100000};
    static const tmpl_time now = {125, 6, 4, 12, 34, 56, 5, 184};
    if (!size) return 0;
    arena a = {0};
    toka_err e = {0};
    buf out = {0};
    tmpl *t = NULL;
    const json *context = json_parse(&a, str_c(fuzz_contexts[data[0] % COUNT(fuzz_contexts)]), json_trusted, &e);
    char *source = mem_alloc(size - 1); /* of the exact size: a read past the end is noticed */
    memcpy(source, data + 1, size - 1);
    int code = tmpl_parse(&t, (str){source, size - 1}, &e);
    free(source); /* a parsed template does not point into its source */
    if (!code) code = tmpl_render(t, &context, 1, now, limits, &out, &e);
    if (code && (code != TOKA_E_INPUT || !str_starts(str_c(e.msg), STR("template line ")))) abort();
    if (out.n > limits.output_bytes || (code && out.n)) abort();
    for (size_t i = 0; i < out.n;) {
        int n = utf8_len(out.p + i, out.p + out.n);
        if (!n) abort();
        i += (size_t)n;
    }
    tmpl_del(t);
    buf_free(&out);
    arena_free(&a);
    return 0;
}
