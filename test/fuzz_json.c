/* fuzz_json.c - libFuzzer entry: a text that parses can be written, and what was written parses to
 * the same value. */
#include "check.h"
#include "test_json.c"

static int fuzz_json(const uint8_t *data, size_t size) {
    arena a = {0};
    buf b = {0};
    toka_err e = {0};
    const json_limits limits = {64, 1 << 20};
    const json *v = json_parse(&a, (str){(const char *)data, size}, limits, &e);
    if (!v && (e.code != TOKA_E_INPUT || !strstr(e.msg, "JSON: "))) abort();
    if (v) {
        json_put_value(&b, v);
        const json *w = json_parse(&a, buf_view(&b), limits, &e);
        if (!w || !json_same(v, w)) abort();
    }
    buf_free(&b);
    arena_free(&a);
    return (void)json_tests, 0;
}
