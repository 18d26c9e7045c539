/* fuzz_hub.c - libFuzzer entry: what a hub may send. The first byte says how a head is cut; the rest is a head and a body, and
 * also a list of files. */
static int fuzz_hub(const uint8_t *data, size_t size) {
    if (!size) return 0;
    const str text = {(const char *)data + 1, size - 1};
    hub_access access = {.endpoint = "https://hub"};
    hub_stream stream = {.access = &access};
    hub_repo repo = {.id = "a/b", .access = access};
    toka_err e;
    buf url = {0};
    const size_t cut = MIN((size_t)data[0], text.n);
    buf_put(&stream.head, text.p, cut);
    bool done = hub_parse_head(&stream);
    if (!done) buf_put(&stream.head, text.p + cut, text.n - cut), done = hub_parse_head(&stream);
    buf_c(&url, "https://cdn/x");
    if (done && !hub_follow(&stream, &url, &e) && !str_starts(buf_view(&url), STR("https://"))) abort();
    if (stream.n_taken > stream.head.n) abort();
    if (!hub_parse_list(&repo, text, &e))
        for (int i = 0; i < repo.n_all; i++)
            if (strstr(repo.all[i].path, "..") == repo.all[i].path || repo.all[i].path[0] == '/' || repo.all[i].n_bytes < 0) {
                if (!hub_is_safe_path(str_c(repo.all[i].path))) abort();
            }
    buf_free(&stream.head), buf_free(&url), arena_free(&repo.memory);
    return 0;
}
