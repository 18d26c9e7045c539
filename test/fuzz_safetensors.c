/* fuzz_safetensors.c - libFuzzer entry: the bytes as a safetensors file, and as an index. A file
 * that parses is bound to a tiny Llama, so that shapes and names are checked, too. Every tensor
 * must lie inside the input. */

static mf_config tiny(arena *a) {
    static const char text[] = "{\"architectures\":[\"LlamaForCausalLM\"],\"num_hidden_layers\":1,\"hidden_size\":4,"
                               "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":6,"
                               "\"vocab_size\":5,\"tie_word_embeddings\":true}";
    mf_config c;
    toka_err e;
    if (mf_config_parse(str_c(text), "config.json", a, &c, &e)) abort();
    return c;
}

static void as_file(str text) {
    arena a = {0};
    st_set set = {0};
    st_alias_list *names = NULL;
    st_tensor *t;
    toka_err e;
    toka_weights w;
    int n;
    mf_config c = tiny(&a);
    mf_binder b = {.config = &c, .set = &set, .where = "f", .weights = &w};
    int code = st_parse(text, "f", &a, &t, &n, &names, &e);
    for (int i = 0; !code && i < n; i++) {
        if (t[i].data < text.p || t[i].end - t[i].begin > (size_t)(text.p + text.n - t[i].data)) abort();
        code = st_set_add(&set, &t[i], &e);
    }
    if (!code) mf_add_aliases(&c, &set, names, &a);
    if (!code) code = mf_bind(&b, &a, &e);
    if (!code && (w.layers[0].mlp.down.rows != 4 || w.lm_head.rows != 5)) abort();
    st_set_free(&set);
    arena_free(&a);
}

static int fuzz_safetensors(const uint8_t *data, size_t size) {
    str text = {(const char *)data, size}, *files;
    arena a = {0};
    st_alias_list *names = NULL;
    toka_err e;
    int n;
    as_file(text);
    if (st_index_parse(text, "i", &a, &files, &n, &names, &e) == 0)
        for (int i = 0; i < n; i++)
            if (memchr(files[i].p, '/', files[i].n)) abort();
    arena_free(&a);
    return 0;
}
