/* fuzz_config.c - libFuzzer entry: the bytes as config.json, generation_config.json,
 * tokenizer_config.json and models.txt. A file that passes must satisfy what chapter 13
 * promises. */

static void check_config(const mf_config *c) {
    const toka_shape *s = &c->shape;
    if (s->L < 1 || s->H < 1 || s->K < 1 || s->D < 2 || s->E < 1 || s->F < 1 || s->V < 1 || s->max_len < 1) abort();
    if (s->D % 2 || s->H % s->K || (int64_t)s->H * s->D > INT_MAX) abort();
    if (mf_n_parameters(c) <= 0) abort();
    for (int i = 0; i < s->L; i++)
        if (c->window[i] < 0) abort();
    for (int i = 0; i < c->rope_table.dims / 2; i++)
        if (!isfinite(c->rope_table.freq[i]) || c->rope_table.freq[i] < 0) abort();
    if (!isfinite(c->rope_table.scale) || c->rope_table.scale <= 0) abort();
    for (int i = 0; i < c->local_table.dims / 2; i++)
        if (!isfinite(c->local_table.freq[i]) || c->local_table.freq[i] < 0) abort();
    for (int i = 0; i < s->L; i++)
        if (c->kind[i] & MF_LAYER_MOE ? c->moe.top_k < 1 || c->moe.top_k > c->moe.n_experts : !c->arch->mlp) abort();
    if (c->features & MF_MLA && (s->K != 1 || s->D != c->mla.latent + c->mla.rope || s->attn_scale <= 0)) abort();
    mf_find_format(c, STR("model.layers.0.mlp.experts.0.up_proj"));
    for (int i = 0; i < c->n_eos_ids; i++)
        if (c->eos_ids[i] < 0 || c->eos_ids[i] >= s->V) abort();
    if (c->bos_id < -1 || c->bos_id >= s->V) abort();
}

static int fuzz_config(const uint8_t *data, size_t size) {
    str text = {(const char *)data, size};
    arena a = {0};
    toka_err e;
    mf_config c;
    mf_defaults d;
    mf_model m = {0};
    mf_known_model *list;
    int n;
    if (mf_config_parse(text, "c", &a, &c, &e) == 0) check_config(&c);
    if (mf_config_parse(STR("{\"model_type\":\"qwen3\"}"), "c", &a, &c, &e)) abort();
    mf_quant_file_parse(text, "q", &a, &c, &e);
    if (mf_config_parse(STR("{\"model_type\":\"llama\",\"num_hidden_layers\":1}"), "c", &a, &c, &e)) abort();
    if (mf_generation_parse(text, "g", &a, &c, &d, &e) == 0) check_config(&c);
    mf_tokenizer_config_parse(text, "t", &a, &m, &e);
    mf_special_map_parse(text, "t", &a, &m, &e);
    mf_added_tokens_parse(text, "t", &a, &m, &e);
    mf_template_file_parse(text, "t", &m, &e);
    mf_join_tokens(&m);
    if (!json_parse(&a, m.token_config, json_trusted, &e)) abort();
    arena_free(&m.memory);
    if (mf_models_parse(text, &a, &list, &n, &e) == 0)
        for (int i = 0; i < n; i++) check_config(&list[i].config);
    arena_free(&a);
    return 0;
}
